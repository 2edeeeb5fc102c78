"""mii.v1.Inference on a worker: protobuf to engine and back, nothing else."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from mii.engine.generator import Delta
from mii.engine.generator import Usage as EngineUsage
from mii.engine.params import check_params
from mii.engine.plan import TokenLogprobs as EngineLogprobs
from mii.engine.prompts import ChatPrompt, GenerationRequest, PromptProcessor
from mii.engine.prompts import Prompt as EnginePrompt
from mii.errors import InvalidArgument
from mii.messages import defaults_of, json_field, sampling_values
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Prompt,
    SequenceDelta,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from mii.proto.inference_pb2_grpc import InferenceServicer
from mii.status import errors_as_status
from mii.workers.loop import EngineLoop, SequencePiece

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(InferenceServicer):
    """Serves one engine.

    Args:
        engine: runs the requests.
        prompts: judges and tokenises them.
        model_name: what users call the model.
        dtype: of its weights.
    """

    def __init__(
        self, engine: EngineLoop, prompts: PromptProcessor, model_name: str, dtype: str
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._model_name = model_name
        self._dtype = dtype
        self._created = int(time.time())
        # Long prompts take long to tokenise: not on the loop, where other calls' tokens pass.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prompts")

    async def Generate(  # type: ignore[override]
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        request_id = request.request_id or secrets.token_hex(16)
        async with errors_as_status(context, request_id):
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._threads, self._prepare, request, request_id)
            call = await self._engine.open([sequence for _, sequence in prepared])
            try:
                await context.send_initial_metadata((("mii-request-id", request_id),))
                gathered = {} if not request.stream else None
                while not call.ended:
                    deltas = self._messages(await call.next(), prepared, gathered)
                    if deltas:
                        yield GenerateResponse(deltas=deltas)
            finally:
                call.close()

    async def Tokenize(  # type: ignore[override]
        self, request: TokenizeRequest, context: Context
    ) -> TokenizeResponse:
        async with errors_as_status(context, "tokenize"):
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(
                self._threads, self._prompts.tokenize, prompt_of(request.prompt), special
            )
            return TokenizeResponse(ids=ids, max_length=self._prompts.limits.max_length)
        raise AssertionError

    async def Detokenize(  # type: ignore[override]
        self, request: DetokenizeRequest, context: Context
    ) -> DetokenizeResponse:
        async with errors_as_status(context, "detokenize"):
            ids = list(request.ids)
            if ids and min(ids) < 0:
                raise InvalidArgument.of("ids", min(ids), "0 or more")
            text = self._prompts.tokenizer.decode(
                ids, skip_special_tokens=not request.keep_special_tokens
            )
            return DetokenizeResponse(text=text)
        raise AssertionError

    async def ListModels(  # type: ignore[override]
        self, request: ListModelsRequest, context: Context
    ) -> ListModelsResponse:
        tokenizer = self._prompts.optional_tokenizer
        model = Model(
            id=self._model_name,
            engine="v2",
            created=self._created,
            max_length=self._prompts.limits.max_length,
            vocab_size=self._prompts.limits.vocab_size,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            dtype=self._dtype,
        )
        return ListModelsResponse(models=[model])

    def _prepare(
        self, request: GenerateRequest, request_id: str
    ) -> list[tuple[int, GenerationRequest]]:
        """Return the sequences of a request, each with the index of its prompt."""
        checked = check_params(sampling_values(request.sampling), "SamplingParams")
        defaults = defaults_of(request.defaults)
        if not request.prompts:
            raise InvalidArgument("the request has no prompts: send at least one", "prompts")
        strict = defaults_of(request.defaults).name == "MODEL"
        return [
            (index, sequence)
            for index, prompt in enumerate(request.prompts)
            for sequence in self._prompts.prepare(
                prompt_of(prompt),
                checked,
                request_id=request_id,
                defaults=defaults,
                strict=strict,
            )
        ]

    def _messages(
        self,
        pieces: Sequence[SequencePiece],
        prepared: Sequence[tuple[int, GenerationRequest]],
        gathered: dict[int, list[Delta]] | None,
    ) -> list[SequenceDelta]:
        """Return the deltas to send now; with `gathered`, a sequence waits there for its end."""
        messages = []
        for piece in pieces:
            deltas = [piece.delta]
            if gathered is not None:
                gathered.setdefault(piece.index, []).append(piece.delta)
                if piece.delta.finish_reason is None:
                    continue
                deltas = gathered.pop(piece.index)
            prompt_index, request = prepared[piece.index]
            messages.append(self._message(prompt_index, request.choice_index, deltas))
        return messages

    def _message(
        self, prompt_index: int, choice_index: int, deltas: Sequence[Delta]
    ) -> SequenceDelta:
        last = deltas[-1]
        return SequenceDelta(
            prompt_index=prompt_index,
            choice_index=choice_index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            logprobs=[
                self._logprobs(token, logprobs)
                for delta in deltas
                for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=False)
            ],
            finish_reason=last.finish_reason or "",
            usage=_usage(last.usage) if last.usage is not None else None,
            stop_match=last.stop_match,
        )

    def _logprobs(self, token: int, logprobs: EngineLogprobs) -> TokenLogprobs:
        return TokenLogprobs(
            sampled=self._logprob(token, logprobs.sampled),
            top=[self._logprob(other, logprob) for other, logprob in logprobs.top],
        )

    def _logprob(self, token: int, logprob: float) -> TokenLogprob:
        tokenizer = self._prompts.optional_tokenizer
        name = tokenizer.token_bytes(token) if tokenizer is not None else b""
        return TokenLogprob(token_id=token, logprob=logprob, token=name)


def prompt_of(prompt: Prompt) -> EnginePrompt:
    """Return what a prompt's message stands for.

    Raises:
        InvalidArgument: if it stands for nothing.
    """
    content = prompt.WhichOneof("content")
    if content == "text":
        return prompt.text
    if content == "token_ids":
        return list(prompt.token_ids.ids)
    if content == "chat":
        chat = prompt.chat
        return ChatPrompt(
            messages=json_field(chat.messages_json, list, "messages"),
            tools=json_field(chat.tools_json, list, "tools") or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=json_field(chat.template_kwargs_json, dict, "chat_template_kwargs"),
        )
    raise InvalidArgument("the prompt has none of text, token_ids and chat", "prompt")


def _usage(usage: EngineUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queue_seconds=usage.queue_seconds,
        time_to_first_token_seconds=usage.time_to_first_token_seconds,
        total_seconds=usage.total_seconds,
    )
