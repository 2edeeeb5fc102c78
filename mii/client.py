"""The Python clients of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mii.engine.params import check_params
from mii.errors import DeploymentError, InvalidArgument, MIIError
from mii.response import Response

if TYPE_CHECKING:
    import grpc

    from mii.proto.inference_pb2 import GenerateRequest, SequenceDelta

_TERMINATE_SECONDS: Final = 15.0  # until a deployment that was told to end must be gone
_CONNECT_SECONDS: Final = 10.0

Prompts = str | Sequence[str] | None
TokenIds = Sequence[Sequence[int]] | None
Messages = Sequence[Mapping[str, Any]] | None


class MIIClient:
    """Asks a deployment. Works in scripts, in several threads at once, and inside an event loop
    (which it blocks while it waits: AsyncMIIClient does not).

    Args:
        address: host:port of the router.
        deployment_name: for messages.
        rest_address: host:port of the REST gateway, if there is one.
        wait_until_gone: called after `terminate_server`; returns when nothing is left.
    """

    def __init__(
        self,
        address: str,
        *,
        deployment_name: str | None = None,
        rest_address: str | None = None,
        wait_until_gone: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.deployment_name = deployment_name
        self.rest_address = rest_address
        self._wait_until_gone = wait_until_gone
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._process = os.getpid()
        self._terminated = False

    def __repr__(self) -> str:
        return f"MIIClient({self.address!r}, deployment_name={self.deployment_name!r})"

    def __call__(
        self,
        prompts: Prompts = None,
        streaming_fn: Callable[[list[Response]], None] | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """See `generate`."""
        return self.generate(prompts, streaming_fn, **params)

    def generate(
        self,
        prompts: Prompts = None,
        streaming_fn: Callable[[list[Response]], None] | None = None,
        *,
        prompt_token_ids: TokenIds = None,
        messages: Messages = None,
        timeout: float | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """Answer prompts.

        Args:
            prompts: one prompt or several.
            streaming_fn: called with a list of one Response for each piece of the answer to the
                only prompt; then nothing is returned.
            prompt_token_ids: token ids in place of prompts.
            messages: a conversation in place of prompts.
            timeout: seconds after which the call is given up, on the server too.
            params: sampling parameters.

        Returns:
            One Response for each prompt (and each of its `n` answers), in order.

        Raises:
            InvalidArgument: for a prompt or parameter that is not allowed.
            ServiceError: if no answer came.
        """
        request = _request(prompts, prompt_token_ids, messages, params)
        if streaming_fn is not None:
            for piece in self._stream(request, timeout):
                streaming_fn([piece])
            return None
        answers = _Answers(request)
        with self._errors():
            for message in self._stub().Generate(request, timeout=timeout):
                for delta in message.deltas:
                    answers.add(delta)
        return answers.all()

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Iterator[Response]:
        """Iterate over the pieces of the answer to one prompt; `str()` of each is its text.

        Closing the iterator early ends the generation. Arguments and errors are `generate`'s.
        """
        ids = None if prompt_token_ids is None else [prompt_token_ids]
        return self._stream(_request(prompt, ids, messages, params), timeout)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        from mii.proto.inference_pb2 import Prompt, TokenizeRequest

        request = TokenizeRequest(prompt=Prompt(text=text), add_special_tokens=add_special_tokens)
        with self._errors():
            return list(self._stub().Tokenize(request).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        from mii.proto.inference_pb2 import DetokenizeRequest

        with self._errors():
            return str(self._stub().Detokenize(DetokenizeRequest(ids=list(ids))).text)

    def terminate_server(self) -> None:
        """End the deployment; return when it is gone. The second time, and if it is gone already,
        nothing happens."""
        if self._terminated:
            return
        import grpc
        from google.protobuf.empty_pb2 import Empty

        from mii.proto.modelresponse_pb2_grpc import ModelResponseStub

        stub = ModelResponseStub(self._open_channel())
        try:
            stub.Terminate(Empty(), timeout=_TERMINATE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                from mii.status import error_of_call

                raise error_of_call(error) from None
        self._terminated = True
        if self._wait_until_gone is not None:
            self._wait_until_gone()
        else:
            self._wait_until_closed()
        self.close()

    def close(self) -> None:
        """Close the connection; the deployment lives on."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _wait_until_closed(self) -> None:
        """Wait until nobody listens at the address any more."""
        import socket

        host, _, port = self.address.rpartition(":")
        until = time.monotonic() + _TERMINATE_SECONDS
        while time.monotonic() < until:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            except OSError:
                return
            time.sleep(0.05)

    def _stream(self, request: GenerateRequest, timeout: float | None) -> Iterator[Response]:
        request.stream = True
        _check_streamable(request)
        answer = _Answers(request)
        with self._errors():
            call = self._stub().Generate(request, timeout=timeout)
            try:
                for message in call:
                    for delta in message.deltas:
                        yield answer.piece(delta)
            finally:
                call.cancel()

    def _stub(self) -> Any:
        from mii.proto.inference_pb2_grpc import InferenceStub

        return InferenceStub(self._open_channel())

    def _open_channel(self) -> grpc.Channel:
        if os.getpid() != self._process:
            raise DeploymentError(
                "this client was made in another process, and its connection does not work in a "
                f"forked one: make a new one here, with mii.client({self.address!r})"
            )
        with self._lock:
            if self._channel is None:
                import grpc

                from mii.channel import channel_options

                self._channel = grpc.insecure_channel(self.address, options=channel_options())
            return self._channel

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise failed calls as errors of ours."""
        import grpc

        from mii.status import error_of_call

        try:
            yield
        except grpc.RpcError as error:
            raise error_of_call(error) from None


class AsyncMIIClient:
    """Asks a deployment with coroutines. Belongs to the event loop that first uses it.

    Args:
        address: host:port of the router.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(
        self,
        prompts: Prompts = None,
        *,
        prompt_token_ids: TokenIds = None,
        messages: Messages = None,
        timeout: float | None = None,
        **params: Any,
    ) -> list[Response]:
        """Answer prompts. See `MIIClient.generate`."""
        request = _request(prompts, prompt_token_ids, messages, params)
        answers = _Answers(request)
        with _aio_errors():
            async for message in self._stub().Generate(request, timeout=timeout):
                for delta in message.deltas:
                    answers.add(delta)
        return answers.all()

    __call__ = generate

    async def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages = None,
        timeout: float | None = None,
        **params: Any,
    ) -> AsyncIterator[Response]:
        """Iterate over the pieces of the answer to one prompt. See `MIIClient.stream`."""
        ids = None if prompt_token_ids is None else [prompt_token_ids]
        request = _request(prompt, ids, messages, params)
        request.stream = True
        _check_streamable(request)
        answer = _Answers(request)
        with _aio_errors():
            call = self._stub().Generate(request, timeout=timeout)
            try:
                async for message in call:
                    for delta in message.deltas:
                        yield answer.piece(delta)
            finally:
                call.cancel()

    async def terminate_server(self) -> None:
        """End the deployment; return when it is gone."""
        await asyncio.to_thread(MIIClient(self.address).terminate_server)
        await self.close()

    async def close(self) -> None:
        """Close the connection; the deployment lives on."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> Any:
        from mii.proto.inference_pb2_grpc import InferenceStub

        loop = asyncio.get_running_loop()
        if self._channel is None:
            from grpc import aio

            from mii.channel import channel_options

            self._channel = aio.insecure_channel(self.address, options=channel_options())
            self._loop = loop
        elif self._loop is not loop:
            raise DeploymentError(
                "this AsyncMIIClient belongs to another event loop: make one in each"
            )
        return InferenceStub(self._channel)


@contextlib.contextmanager
def _aio_errors() -> Iterator[None]:
    import grpc

    from mii.status import error_of_call

    try:
        yield
    except grpc.RpcError as error:
        raise error_of_call(error) from None


class _Answers:
    """The answers of one call, as they come."""

    def __init__(self, request: GenerateRequest) -> None:
        self._choices = request.sampling.n if request.sampling.HasField("n") else 1
        self._count = len(request.prompts) * self._choices
        self._done: dict[int, Response] = {}
        self._prompt_length = 0
        self._generated = 0

    def add(self, delta: SequenceDelta) -> None:
        """Take a whole answer in."""
        index = delta.prompt_index * self._choices + delta.choice_index
        self._done[index] = Response(
            generated_text=delta.text,
            prompt_length=delta.usage.prompt_tokens,
            generated_length=delta.usage.completion_tokens,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids),
            logprobs=[_logprobs(each) for each in delta.logprobs],
        )

    def piece(self, delta: SequenceDelta) -> Response:
        """Return a piece of the only answer."""
        self._generated += len(delta.token_ids)
        self._prompt_length = delta.usage.prompt_tokens or self._prompt_length
        return Response(
            generated_text=delta.text,
            prompt_length=self._prompt_length,
            generated_length=self._generated,
            finish_reason=delta.finish_reason or "none",
            token_ids=list(delta.token_ids),
            logprobs=[_logprobs(each) for each in delta.logprobs],
        )

    def all(self) -> list[Response]:
        """Return the answers in the order of their prompts."""
        missing = self._count - len(self._done)
        if missing:
            raise MIIError(f"the server ended the call with {missing} answers missing")
        return [self._done[index] for index in range(self._count)]


def _logprobs(message: Any) -> Any:
    from mii.engine.plan import TokenLogprobs

    top = tuple((each.token_id, each.logprob) for each in message.top)
    return TokenLogprobs(message.sampled.logprob, top)


def _request(
    prompts: Prompts, token_ids: TokenIds, messages: Messages, params: Mapping[str, Any]
) -> GenerateRequest:
    from mii.messages import sampling_message
    from mii.proto.inference_pb2 import GenerateRequest

    values = {name: _plain(value) for name, value in params.items()}
    values.pop("stream", None)  # DeepSpeed-MII's; the call itself says whether it streams
    return GenerateRequest(
        prompts=_prompts(prompts, token_ids, messages),
        sampling=sampling_message(check_params(values, "generate()")),
    )


def _prompts(prompts: Prompts, token_ids: TokenIds, messages: Messages) -> list[Any]:
    import json

    from mii.proto.inference_pb2 import Chat, Prompt
    from mii.proto.inference_pb2 import TokenIds as TokenIdsMessage

    if sum(given is not None for given in (prompts, token_ids, messages)) != 1:
        raise InvalidArgument(
            "give exactly one of prompts, prompt_token_ids and messages", "prompts"
        )
    if messages is not None:
        chat = Chat(messages_json=json.dumps(list(messages)), add_generation_prompt=True)
        return [Prompt(chat=chat)]
    if token_ids is not None:
        return [Prompt(token_ids=TokenIdsMessage(ids=_ids(ids))) for ids in token_ids] or _none()
    texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
    for text in texts:
        if not isinstance(text, str):
            raise InvalidArgument.of("prompts", text, "a string or a list of strings")
    # Protobuf strings are UTF-8, which has no lone surrogates.
    return [Prompt(text=text.encode("utf-8", "replace").decode()) for text in texts] or _none()


def _none() -> list[Any]:
    raise InvalidArgument("the list of prompts is empty: give at least one", "prompts")


def _ids(ids: object) -> list[int]:
    allowed = "lists of token ids, 0 to 2147483647 each"
    try:
        plain = [int(i) for i in ids]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise InvalidArgument.of("prompt_token_ids", ids, allowed) from None
    if any(not 0 <= i < 2**31 for i in plain):
        raise InvalidArgument.of("prompt_token_ids", ids, allowed)
    return plain


def _plain(value: object) -> object:
    """Return numpy's and torch's scalars as Python's own."""
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "shape", None) == () else value


def _check_streamable(request: GenerateRequest) -> None:
    choices = request.sampling.n if request.sampling.HasField("n") else 1
    if len(request.prompts) != 1 or choices != 1:
        raise InvalidArgument(
            f"streaming takes one prompt with n = 1, and there are {len(request.prompts)} prompts "
            f"with n = {choices}: call once for each",
            "prompts",
        )
