"""From logits to tokens: one state for each request, one sampler for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mii.engine.grammar import Grammar
from mii.engine.params import SamplingParams
from mii.engine.plan import TokenLogprobs
from mii.kernels.sampling import Draw, Floats, apply_penalties, draw_tokens, most_probable

if TYPE_CHECKING:
    from mii.engine.prompts import GenerationRequest

LEAST_LOGPROB = -9999.0  # stands for anything less, as in the OpenAI API; JSON has no infinity


class TokenCounts:
    """The tokens that a request has seen, and how often each was generated.

    Takes room for the tokens seen, not for the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        """Begin with a prompt, whose tokens count 0."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._counts = np.zeros(len(self._ids), dtype=np.int32)

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = np.zeros(max(64, place), dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room.astype(np.int32)))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens, each once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """For each of `ids`, how often it was generated."""
        return self._counts[: len(self._places)]


class SamplingState:
    """What drawing a request's next token depends on, beside its logits.

    All of it follows from the request and its tokens so far: after preemption or failover, `replay`
    gives the same state, and so the same further tokens.

    Args:
        params: the request's parameters.
        seed: 64 bits; what `params.seed` says, or a drawn one.
        choice: which of the prompt's answers this is.
        prompt_ids: the prompt; only the repetition penalty asks for it.
        stop_ids: ids that end the answer; not sampled before `params.min_new_tokens`.
        grammar: what the answer must match; a fork of it is used.
    """

    __slots__ = (
        "_bias_ids",
        "_biases",
        "_counts",
        "_grammar",
        "_prompt_ids",
        "_stop_ids",
        "choice",
        "params",
        "position",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        prompt_ids: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.choice = choice
        self.position = 0  # tokens of the answer so far
        self._prompt_ids = prompt_ids if params.repetition_penalty != 1.0 else ()
        self._counts: TokenCounts | None = None
        self._bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        masked = sorted(stop_ids) if params.min_new_tokens > 0 else ()
        self._stop_ids = np.array(masked, dtype=np.int64)
        self._grammar = grammar.fork() if grammar is not None else None
        self.replay(())

    @classmethod
    def of(cls, request: GenerationRequest) -> SamplingState:
        """Return the state of a request that has no tokens yet."""
        return cls(
            request.params,
            seed=request.seed,
            choice=request.choice_index,
            prompt_ids=request.prompt_ids,
            stop_ids=request.stop_ids,
            grammar=request.grammar,
        )

    @property
    def needs_host(self) -> bool:
        """Whether drawing takes more than temperature, top_k, top_p, min_p and noise."""
        params = self.params
        return (
            params.has_penalties
            or bool(params.logit_bias)
            or params.logprobs is not None
            or len(self._stop_ids) > 0
            or self._grammar is not None
        )

    @property
    def failure(self) -> str:
        """Why the answer cannot go on; "" if it can."""
        return self._grammar.failure if self._grammar is not None else ""

    def append(self, token: int) -> None:
        """Take notice of the answer's next token."""
        self.position += 1
        if self._counts is not None:
            self._counts.add(token)
        if self._grammar is not None:
            self._grammar.append(token)

    def replay(self, tokens: Iterable[int]) -> None:
        """Begin anew, with the answer's tokens so far."""
        self.position = 0
        self._counts = TokenCounts(self._prompt_ids) if self.params.has_penalties else None
        if self._grammar is not None:
            self._grammar.reset()
        for token in tokens:
            self.append(token)

    def adjust(self, logits: Floats) -> Floats:
        """Return logits [V] with penalties, biases, minimum length and grammar applied.

        The argument is not changed; it is returned itself where there is nothing to apply.
        """
        short = self.position < self.params.min_new_tokens and len(self._stop_ids) > 0
        grammar = self._grammar
        if self._counts is None and len(self._bias_ids) == 0 and not short and grammar is None:
            return logits
        logits = logits.copy()
        if self._counts is not None:
            apply_penalties(
                logits,
                self._counts.ids,
                self._counts.counts,
                repetition=self.params.repetition_penalty,
                presence=self.params.presence_penalty,
                frequency=self.params.frequency_penalty,
            )
        logits[self._bias_ids] += self._biases
        allowed = grammar.allowed() if grammar is not None else None
        # What must end has a shorter answer than asked for: nothing else may follow.
        if short and (allowed is None or allowed.sum() > allowed[self._stop_ids].sum()):
            logits[self._stop_ids] = -np.inf
        if allowed is not None:
            logits[~allowed] = -np.inf
        return logits

    def draw(self) -> Draw:
        """Return how the next token is to be drawn."""
        params = self.params
        return Draw(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            choice=self.choice,
            position=self.position,
        )


class Sampler:
    """Draws the next token of each sequence of a step. Keeps nothing from one step to the next.

    Args:
        vocab_size: ids from here on are never drawn, if logits have more columns than that.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingState]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Draw a token from each row of logits.

        A token depends on its own row and state alone, not on the other rows. A row with NaN gives
        the most probable of the other tokens (0 if there is none), and so does one with +inf.

        Args:
            logits: fp32 [L, at least vocab_size]; not changed.
            rows: the state of each; not changed (`append` is the caller's).

        Returns:
            The L token ids, and by row number the log-probabilities of rows that ask for them.
        """
        with np.errstate(all="ignore"):  # infinities and NaN in the logits are provided for
            host = logits.detach().to("cpu", torch.float32).numpy()[:, : self._vocab_size]
            adjusted = [state.adjust(row) for state, row in zip(rows, host, strict=True)]
            tokens = _choose(adjusted, rows)
            logprobs = {
                index: _logprobs(host[index], tokens[index], state.params.logprobs)
                for index, state in enumerate(rows)
                if state.params.logprobs is not None
            }
        return tokens, logprobs


def _choose(logits: Sequence[Floats], rows: Sequence[SamplingState]) -> list[int]:
    tokens = [0] * len(rows)
    drawn = [index for index, state in enumerate(rows) if not state.params.greedy]
    for index, state in enumerate(rows):
        if state.params.greedy:
            tokens[index] = most_probable(logits[index])
    if drawn:
        draws = [rows[index].draw() for index in drawn]
        ids = draw_tokens([logits[index] for index in drawn], draws)
        for index, token in zip(drawn, ids, strict=True):
            tokens[index] = token
    return tokens


def _logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Return the token's log-probability and the `count` greatest, under softmax(logits)."""
    logprobs = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    logprobs = torch.nan_to_num(logprobs, nan=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)
    values, ids = torch.topk(logprobs, min(count, len(logits)))
    return TokenLogprobs(
        sampled=float(logprobs[token]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )
