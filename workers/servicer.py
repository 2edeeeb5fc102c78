"""mii.v1.Inference on rank 0: protobuf to engine and back, nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

from mii import traces
from mii.config import EngineConfig
from mii.engine.generator import Usage as EngineUsage
from mii.engine.params import check_params
from mii.engine.plan import TokenLogprobs as EngineLogprobs
from mii.engine.prompts import ChatPrompt, GenerationRequest, PromptProcessor
from mii.engine.prompts import Prompt as EnginePrompt
from mii.errors import InvalidArgument, MIIError, Unavailable
from mii.http2.server_call import Handler, ServerCall
from mii.messages import (
    ACCEPTED_KEY,
    check_model,
    check_prompt,
    check_request,
    defaults_of,
    json_field,
    new_request_id,
    partial_answers,
    sampling_values,
    seed_of,
)
from mii.proto.inference_pb2 import (
    Chat,
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
from mii.proto.worker_pb2 import HoldingRequest, HoldingResponse
from mii.rpc.methods import answered_by_stream, answered_once, errors_as_status
from mii.workers.loop import EngineLoop, Piece
from mii.workers.orphans import Orphans, RecordedCall
from mii.workers.request_log import RequestLog

_PROMPT_THREADS: Final = 2
# Of an answer that is not streamed, the router gets so many at a time: what it has is not lost with
# the worker, and costs next to nothing.
_UNSTREAMED_TOKENS: Final = 64
_NAMED_TOKENS: Final = 65536  # whose bytes are remembered, for log-probabilities

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Sequence:
    """One sequence of a call."""

    prompt_index: int
    request: GenerationRequest
    begun: bool = False  # a delta of it has been sent


class Servicer:
    """Serves one engine.

    Args:
        engine: runs the requests.
        prompts: judges and tokenises them.
        config: the engine's.
    """

    def __init__(self, engine: EngineLoop, prompts: PromptProcessor, config: EngineConfig) -> None:
        self._engine = engine
        self._orphans = Orphans(engine)
        self._prompts = prompts
        self._model = _describe(config, prompts)
        # Long texts take long to tokenise: not on the event loop, where other calls' tokens pass.
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="prompts")
        self._bytes_of = lru_cache(_NAMED_TOKENS)(self._token_bytes)

    @property
    def serving(self) -> bool:
        """Whether a request would be answered."""
        return self._engine.takes_requests

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        return {
            "/mii.v1.Inference/Generate": answered_by_stream(GenerateRequest, self._generate),
            "/mii.v1.Inference/Tokenize": answered_once(TokenizeRequest, self._tokenize),
            "/mii.v1.Inference/Detokenize": answered_once(DetokenizeRequest, self._detokenize),
            "/mii.v1.Inference/ListModels": answered_once(ListModelsRequest, self._list_models),
            "/mii.v1.Worker/Holding": answered_once(HoldingRequest, self._holding),
        }

    async def _generate(self, request: GenerateRequest, call: ServerCall) -> None:
        request_id = request.request_id or new_request_id()
        with (
            errors_as_status(request_id),
            self._unwell_without_memory(),
            traces.span(call.path, call.headers) as span,
        ):
            running = self._orphans.claim(request)
            if running is None:
                running = await self._begin(request, RequestLog(request_id, span))
            try:
                call.send_initial_metadata(((ACCEPTED_KEY, request_id),))
                for message in running.messages_for(request):  # that another router got
                    call.send(message)
                call.on_writable(running.answers.pass_on)
                await running.answers.send_to(
                    lambda pieces: call.send(running.message_of(pieces)), lambda: call.writable
                )
            except BaseException as error:
                cut_off = call.loss is not None and call.loss.with_connection
                if cut_off and isinstance(error, asyncio.CancelledError):
                    self._orphans.keep(running, call.time_remaining())
                else:
                    self._engine.release(running.answers)
                raise
            self._orphans.keep(running, call.time_remaining())

    async def _begin(self, request: GenerateRequest, log: RequestLog) -> RecordedCall:
        """Queue a request.

        Raises:
            MIIError: if that is not possible.
        """
        sequences = await self._aside(lambda: self._prepare(request, log.request_id))

        def message_of(pieces: list[Piece]) -> GenerateResponse:
            deltas = [self._delta(sequences[piece.index], piece, log) for piece in pieces]
            return GenerateResponse(deltas=deltas)

        least = 1 if request.stream else _UNSTREAMED_TOKENS
        requests = [sequence.request for sequence in sequences]
        return RecordedCall(request, await self._engine.submit(requests, least=least), message_of)

    async def _holding(self, request: HoldingRequest, call: ServerCall) -> HoldingResponse:
        return HoldingResponse(request_ids=self._orphans.holding(request.request_ids))

    @contextmanager
    def _unwell_without_memory(self) -> Iterator[None]:
        """Have the process end when memory runs out: another worker can answer, this one cannot."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MIIError) or not _is_lack_of_memory(error):
                raise
            self._engine.give_up(error)
            raise Unavailable("this worker has run out of memory") from None

    async def _tokenize(self, request: TokenizeRequest, call: ServerCall) -> TokenizeResponse:
        check_model(request.model, self._model.id)
        check_prompt("prompt", request.prompt)
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        ids = await self._aside(
            lambda: self._prompts.tokenize(engine_prompt(request.prompt), special)
        )
        return TokenizeResponse(ids=ids, max_length=self._model.max_length)

    async def _detokenize(self, request: DetokenizeRequest, call: ServerCall) -> DetokenizeResponse:
        check_model(request.model, self._model.id)
        text = await self._aside(lambda: self._decode(request.ids, request.keep_special_tokens))
        return DetokenizeResponse(text=text)

    async def _list_models(
        self, request: ListModelsRequest, call: ServerCall
    ) -> ListModelsResponse:
        return ListModelsResponse(models=[self._model])

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        """Do work in another thread, where log lines name the request, too."""
        within = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, within, work)

    def _prepare(self, request: GenerateRequest, request_id: str) -> list[_Sequence]:
        """Judge and tokenise a request.

        Raises:
            InvalidArgument: naming what is not allowed.
        """
        check_request(request, self._model.id)
        params = check_params(sampling_values(request.sampling), "SamplingParams")
        partial = partial_answers(request)
        sequences = []
        for index, prompt in enumerate(request.prompts):
            if partial is not None and index not in partial:
                continue
            seed = seed_of(request, index)
            prepared = self._prompts.prepare(
                engine_prompt(prompt),
                params if seed is None else {**params, "seed": seed},
                request_id=request_id,
                defaults=defaults_of(request.defaults),
                resumed=None if partial is None else partial[index],
                client=request.client,
            )
            sequences += [_Sequence(index, sequence) for sequence in prepared]
        return sequences

    def _decode(self, ids: Sequence[int], keep_special_tokens: bool) -> str:
        count, limit = len(ids), self._model.max_length
        if count > limit:  # before they are looked at: there may be millions
            raise InvalidArgument(
                f"ids has {count} token ids: it must have at most {limit}, the context", "ids"
            )
        allowed = range(self._model.vocab_size)
        for token in ids:
            if token not in allowed:
                raise InvalidArgument.of("ids", token, f"a token id from 0 to {allowed[-1]}")
        return self._prompts.tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special_tokens
        )

    def _delta(self, sequence: _Sequence, piece: Piece, log: RequestLog) -> SequenceDelta:
        if piece.usage is not None:
            usage = _usage(piece.usage)
            log.ended(sequence.request.choice_index, piece.usage, piece.finish_reason)
        elif not sequence.begun:
            usage = Usage(prompt_tokens=len(sequence.request.prompt_ids))
        else:
            usage = None
        sequence.begun = True
        return SequenceDelta(
            prompt_index=sequence.prompt_index,
            choice_index=sequence.request.choice_index,
            text="".join(piece.texts),
            token_ids=piece.token_ids,
            logprobs=map(self._logprobs, piece.token_ids, piece.logprobs),
            finish_reason=piece.finish_reason or "",
            usage=usage,
            stop_match=piece.stop_match,
        )

    def _logprobs(self, token: int, logprobs: EngineLogprobs) -> TokenLogprobs:
        return TokenLogprobs(
            sampled=self._logprob(token, logprobs.sampled),
            top=[self._logprob(other, logprob) for other, logprob in logprobs.top],
        )

    def _logprob(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id=token, logprob=logprob, token=self._bytes_of(token))

    def _token_bytes(self, token: int) -> bytes:
        tokenizer = self._prompts.optional_tokenizer
        return tokenizer.token_bytes(token) if tokenizer is not None else b""


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says that the system gives no more memory; a thread needs some, too."""
    return isinstance(error, MemoryError) or "start new thread" in str(error)


def engine_prompt(prompt: Prompt) -> EnginePrompt:
    """Return what a prompt's message stands for.

    Raises:
        InvalidArgument: for JSON that is none, or not of the kind that is wanted.
    """
    content = prompt.WhichOneof("content")
    if content == "token_ids":
        return list(prompt.token_ids.ids)
    return _conversation(prompt.chat) if content == "chat" else prompt.text


def _conversation(chat: Chat) -> ChatPrompt:
    return ChatPrompt(
        messages=json_field(chat.messages_json, list, "messages"),
        tools=json_field(chat.tools_json, list, "tools") or None,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs=json_field(chat.template_kwargs_json, dict, "chat_template_kwargs"),
    )


def _describe(config: EngineConfig, prompts: PromptProcessor) -> Model:
    tokenizer = prompts.optional_tokenizer
    return Model(
        id=config.model_name,
        engine="v2",
        created=int(time.time()),
        max_length=prompts.limits.max_length,
        vocab_size=prompts.limits.vocab_size,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        dtype=config.dtype,
        tool_format=tokenizer.tool_format if tokenizer is not None else "",
    )


def _usage(usage: EngineUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queue_seconds=usage.queue_seconds,
        time_to_first_token_seconds=usage.time_to_first_token_seconds,
        total_seconds=usage.total_seconds,
    )
