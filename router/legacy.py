"""DeepSpeed-MII's service `modelresponse.ModelResponse`: its messages to ours and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Mapping

from google.protobuf.empty_pb2 import Empty

from mii.engine.params import check_params
from mii.errors import InvalidArgument
from mii.http2.server_call import Handler, ServerCall
from mii.messages import MAX_SEQUENCES, check_sampling_size, new_request_id, sampling_message
from mii.proto.inference_pb2 import (
    DEFAULTS_MII,
    GenerateRequest,
    GenerateResponse,
    Prompt,
    SequenceDelta,
)
from mii.proto.modelresponse_pb2 import (
    MultiGenerationReply,
    MultiStringRequest,
    SingleGenerationReply,
    Value,
)
from mii.router.relay import Relay
from mii.rpc.methods import answered_by_stream, answered_once, errors_as_status

# Parameters of DeepSpeed-MII that its server overwrites with what it knows better.
_IGNORED = frozenset(("prompt_length", "stream"))
_LISTS = frozenset(("stop", "stop_strings", "stop_token_ids"))


class LegacyServicer:
    """`modelresponse.ModelResponse`, answered by the replicas."""

    def __init__(self, relay: Relay, terminate: Callable[[], Awaitable[None]]) -> None:
        """Serve.

        Args:
            relay: answers.
            terminate: asks for the deployment's end; the client is answered when it returns.
        """
        self._relay = relay
        self._terminate = terminate

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        service = "/modelresponse.ModelResponse"
        return {
            f"{service}/Terminate": answered_once(Empty, self._end),
            f"{service}/GeneratorReply": answered_once(MultiStringRequest, self._reply),
            f"{service}/GeneratorReplyStream": answered_by_stream(MultiStringRequest, self._stream),
        }

    async def _end(self, request: Empty, call: ServerCall) -> Empty:
        await self._terminate()
        return Empty()

    async def _reply(self, request: MultiStringRequest, call: ServerCall) -> MultiGenerationReply:
        request_id = new_request_id()
        with errors_as_status(request_id):
            ours = _generate_request(request, request_id, stream=False)
            answers: dict[tuple[int, int], SequenceDelta] = {}
            async with self._relay.generate(ours, call.time_remaining()) as generation:
                async for message in generation:
                    for delta in message.deltas:
                        answers[delta.prompt_index, delta.choice_index] = delta
            return MultiGenerationReply(response=[_reply(answers[key]) for key in sorted(answers)])

    async def _stream(self, request: MultiStringRequest, call: ServerCall) -> None:
        request_id = new_request_id()
        with errors_as_status(request_id):
            ours = _generate_request(request, request_id, stream=True)
            if len(ours.prompts) != 1 or ours.sampling.n > 1:
                raise InvalidArgument("a stream answers exactly one prompt, once", "request")
            async with self._relay.generate(ours, call.time_remaining()) as generation:
                call.on_writable(generation.pass_on)
                await generation.send_to(_Sink(call))


class _Sink:
    """Turns a stream's messages into DeepSpeed-MII's, and sends them."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call
        self._prompt_tokens = self._generated_tokens = 0

    @property
    def writable(self) -> bool:
        return self._call.writable

    def send(self, body: bytes) -> None:
        for delta in GenerateResponse.FromString(body).deltas[:]:
            self._prompt_tokens = delta.usage.prompt_tokens or self._prompt_tokens
            self._generated_tokens += len(delta.token_ids)
            if delta.text:
                self._send(_piece(delta, self._prompt_tokens, self._generated_tokens))
            if delta.finish_reason:
                delta.text = ""
                self._send(MultiGenerationReply(response=[_reply(delta)]))

    def _send(self, reply: MultiGenerationReply) -> None:
        self._call.send(reply.SerializeToString())


def _generate_request(
    request: MultiStringRequest, request_id: str, *, stream: bool
) -> GenerateRequest:
    """Return our request for one of DeepSpeed-MII, which is emptied."""
    count = len(request.request)
    if count > MAX_SEQUENCES:  # before they are copied: a message may hold millions
        raise InvalidArgument(
            f"a request has 1 to {MAX_SEQUENCES} prompts: this one has {count}", "request"
        )
    texts = list(request.request)
    request.ClearField("request")
    check_sampling_size(request.ByteSize())
    return GenerateRequest(
        request_id=request_id,
        prompts=[Prompt(text=text) for text in texts],
        sampling=sampling_message(check_params(keyword_arguments(request.query_kwargs))),
        stream=stream,
        defaults=DEFAULTS_MII,
    )


def _reply(delta: SequenceDelta) -> SingleGenerationReply:
    usage = delta.usage
    return SingleGenerationReply(
        response=delta.text,
        finish_reason=delta.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        time_taken=usage.total_seconds,
        model_time_taken=max(0.0, usage.total_seconds - usage.queue_seconds),
    )


def _piece(delta: SequenceDelta, prompt_tokens: int, generated_tokens: int) -> MultiGenerationReply:
    return MultiGenerationReply(
        response=[
            SingleGenerationReply(
                response=delta.text,
                finish_reason="none",
                prompt_tokens=prompt_tokens,
                generated_tokens=generated_tokens,
                time_taken=delta.usage.total_seconds,
            )
        ]
    )


def keyword_arguments(arguments: Mapping[str, Value]) -> dict[str, object]:
    """Return keyword arguments as a Python client had them before they were packed.

    Raises:
        InvalidArgument: for a dictionary that stands for no list where a list belongs.
    """
    return {
        name: _list(name, value) if name in _LISTS else _plain(value)
        for name, value in arguments.items()
        if name not in _IGNORED
    }


def _plain(value: Value) -> object:
    kind = value.WhichOneof("oneof_values")
    if kind == "fvalue":
        return shortest_decimal(value.fvalue)
    if kind == "mvalue":
        return {key: _plain(item) for key, item in value.mvalue.values.items()}
    return None if kind is None else getattr(value, kind)


def _list(name: str, value: Value) -> object:
    """Return the list that came as a dictionary with keys "0", "1", ...; others as they are."""
    plain = _plain(value)
    if not isinstance(plain, dict):
        return plain
    keys = [str(index) for index in range(len(plain))]
    if plain.keys() != set(keys):
        raise InvalidArgument(f'{name} is a dictionary whose keys are not "0", "1", ...', name)
    return [plain[key] for key in keys]


def shortest_decimal(single: float) -> float | int:
    """Return the number that a client wrote before protobuf cut it to 32 bits.

    That is the decimal with the fewest digits that is `single` in 32 bits (0.7, not 0.699999988);
    a whole number is returned as an int, which every parameter that takes numbers also takes.
    """
    if not math.isfinite(single):
        return single
    if single.is_integer():
        return int(single)
    packed = struct.pack("f", single)
    candidates = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if struct.pack("f", number) == packed), single)
