"""Turns what a user sends into requests that the engine can run: judged, rendered, tokenised."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mii.engine.grammar import Grammar, GrammarCompiler, Guide
from mii.engine.params import (
    Defaults,
    SamplingParams,
    check_token_ids,
    resolve_length,
    resolve_params,
)
from mii.engine.stopping import special_stop_ids
from mii.errors import ContextLengthExceeded, InvalidArgument
from mii.models.tokenizer import TokenizerLike


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Sequence[int] | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. Everything in it has been checked."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 63 bits
    choice_index: int  # which of the prompt's n answers
    max_new_tokens: int
    stop_ids: frozenset[int]  # ids that end the sequence
    stop_strings: tuple[str, ...]
    prefix_text: str = ""  # what the answer's text begins with
    grammar: Grammar | None = None  # what the answer must match, at its beginning
    answer_ids: tuple[int, ...] = ()  # the answer so far, by another engine: to be gone on with
    client: str = ""  # whom it is counted for
    moved: bool = False  # from another engine, that is gone


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is judged against."""

    vocab_size: int
    max_length: int  # tokens that the engine can hold for one sequence
    eos_ids: frozenset[int]
    generation_defaults: Mapping[str, Any]  # see params.model_defaults


class PromptProcessor:
    """Prepares requests. Keeps nothing of them: may be used from any thread."""

    def __init__(self, tokenizer: TokenizerLike | None, limits: ModelLimits) -> None:
        self.optional_tokenizer = tokenizer
        self.limits = limits
        self._compiler: GrammarCompiler | None = None

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer.

        Raises:
            InvalidArgument: if the engine runs without one.
        """
        if self.optional_tokenizer is None:
            raise InvalidArgument(
                "this model is served without a tokenizer (skip_tokenizer): send token ids",
                "prompt",
            )
        return self.optional_tokenizer

    def prepare(
        self,
        prompt: Prompt,
        checked_params: Mapping[str, Any],
        *,
        request_id: str,
        defaults: Defaults = Defaults.MII,
        resumed: Mapping[int, Sequence[int]] | None = None,
        client: str = "",
    ) -> list[GenerationRequest]:
        """Return one request for each of the `n` answers.

        Args:
            prompt: text, token ids, or a conversation.
            checked_params: what `check_params` returned.
            request_id: for logs.
            defaults: what stands in for parameters left out. With those of the model, a
                max_new_tokens that the context cannot hold is refused.
            resumed: the answers, by choice, that another engine has begun and that are to be gone
                on with, and their tokens so far; None: all `n`, from the beginning.
            client: whom it is counted for; "": nobody in particular.

        Raises:
            InvalidArgument: for a prompt or parameter that this model cannot take.
        """
        params = resolve_params(checked_params, defaults, self.limits.generation_defaults)
        check_token_ids(params, self.limits.vocab_size)
        ids = self.tokenize(prompt)
        if not ids:
            raise InvalidArgument("the prompt is empty: send at least one token", "prompt")
        strict = defaults is Defaults.MODEL
        room = resolve_length(params, len(ids), self.limits.max_length, strict=strict)
        self._check_ids(ids, "prompt")  # after their number: there may be millions
        stop_ids = frozenset(params.stop_token_ids)
        if params.stop:
            stop_ids |= special_stop_ids(params.stop, self.tokenizer)
        grammar = self._grammar(params)
        if grammar is not None or not params.ignore_eos:
            stop_ids |= self.limits.eos_ids
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=tuple(ids),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            choice_index=0,
            max_new_tokens=room,
            stop_ids=stop_ids,
            stop_strings=params.stop,
            prefix_text=self._prompt_text(prompt, ids) if params.return_full_text else "",
            grammar=grammar,
            client=client,
            moved=resumed is not None,
        )
        if resumed is None:
            resumed = {choice: () for choice in range(params.n)}
        return [
            self._resume(replace(request, choice_index=choice), answer)
            for choice, answer in resumed.items()
        ]

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        guide = Guide.of(params)
        if guide is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self.limits.vocab_size)
        return self._compiler.compile(guide)

    def _resume(self, request: GenerationRequest, answer: Sequence[int]) -> GenerationRequest:
        """Let a request go on after the tokens of its answer so far."""
        if not 0 <= request.choice_index < request.params.n:
            allowed = f"an answer's number from 0 to {request.params.n - 1}"
            raise InvalidArgument.of("resume.choice_index", request.choice_index, allowed)
        if not answer:
            return request
        if len(answer) >= request.max_new_tokens:
            allowed = f"shorter than the whole answer, {request.max_new_tokens} tokens"
            raise InvalidArgument.of("resume.token_ids", answer, allowed)
        self._check_ids(answer, "resume.token_ids")
        # The text that the answer begins with has been shown.
        return replace(request, answer_ids=tuple(answer), prefix_text="")

    def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the token ids of a prompt; the text of a conversation gets no further ones.

        Raises:
            ContextLengthExceeded: for a text that certainly does not fit.
            InvalidArgument: for a conversation that the template refuses.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens, limit=self.limits.max_length)
        if isinstance(prompt, ChatPrompt):
            self._check_count(prompt)
            text = self.tokenizer.render_chat(
                prompt.messages,
                tools=prompt.tools,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                template_kwargs=prompt.template_kwargs,
            )
            return self.tokenizer.encode(text, False, limit=self.limits.max_length)
        return prompt

    def _check_ids(self, ids: Sequence[int], field_name: str) -> None:
        size = self.limits.vocab_size
        if max(ids) >= size or min(ids) < 0:
            wrong = next(i for i in ids if not 0 <= i < size)
            raise InvalidArgument.of(field_name, wrong, f"a token id from 0 to {size - 1}")

    def _check_count(self, prompt: ChatPrompt) -> None:
        """Refuse, before it is rendered, a conversation of more messages than there is room for."""
        count = len(prompt.messages)
        if count > self.limits.max_length:
            raise ContextLengthExceeded(
                f"the conversation has {count} messages, and the context is "
                f"{self.limits.max_length} tokens: leave out older messages",
                "messages",
            )

    def _prompt_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
