"""The Python client of a deployment for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mii.client import (
    DeploymentClient,
    MIIClient,
    StreamingFunction,
    detokenize_request,
    tokenize_request,
)
from mii.errors import Cancelled, Overloaded, Unavailable
from mii.generation import (
    Messages,
    Prompts,
    StreamedAnswer,
    TokenIds,
    WholeAnswers,
    check_streaming_fn,
    check_timeout,
    generation_request,
)
from mii.proto.inference_pb2 import GenerateRequest, GenerateResponse
from mii.response import Response
from mii.retries import Attempts

if TYPE_CHECKING:
    import grpc


class AsyncMIIClient(DeploymentClient):
    """Asks a deployment with coroutines. Each event loop that uses it gets its own connection."""

    def __init__(self, address: str, **facts: Any) -> None:
        super().__init__(address, **facts)
        self._channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, grpc.aio.Channel] = (
            weakref.WeakKeyDictionary()
        )

    async def generate(
        self,
        prompts: Prompts | None = None,
        streaming_fn: StreamingFunction | None = None,
        *,
        prompt_token_ids: TokenIds | None = None,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """Answer prompts. See `MIIClient.generate`; `streaming_fn` may be a coroutine function."""
        check_streaming_fn(streaming_fn)
        streams = streaming_fn is not None
        request = generation_request(prompts, prompt_token_ids, messages, params, stream=streams)
        seconds = check_timeout(timeout)
        if streaming_fn is not None:
            async with contextlib.aclosing(self._stream(request, seconds)) as pieces:
                async for piece in pieces:
                    result = streaming_fn([piece])
                    if inspect.isawaitable(result):
                        await result
            return None
        answers = WholeAnswers(request)
        async with contextlib.aclosing(self._messages(request, seconds)) as received:
            async for message in received:
                answers.add(message)
        return answers.responses()

    __call__ = generate

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: TokenIds | None = None,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> AsyncGenerator[Response]:
        """Iterate over the pieces of the answer to one prompt. See `MIIClient.stream`."""
        request = generation_request(prompt, prompt_token_ids, messages, params, stream=True)
        return self._stream(request, check_timeout(timeout))

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, timeout: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, by default with the special tokens of a prompt."""
        request = tokenize_request(text, add_special_tokens)
        return list((await self._ask("Tokenize", request, timeout)).ids)

    async def detokenize(
        self,
        ids: Sequence[int],
        keep_special_tokens: bool = False,
        *,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = detokenize_request(ids, keep_special_tokens)
        return str((await self._ask("Detokenize", request, timeout)).text)

    async def terminate_server(self) -> None:
        """End the deployment; return when it is gone. See `MIIClient.terminate_server`."""
        if self.terminated:
            return
        with MIIClient(
            self.address,
            deployment_name=self.deployment_name,
            wait_until_gone=self.wait_until_gone,
            **asdict(self.security),
        ) as client:
            await asyncio.to_thread(client.terminate_server)
        self.terminated = True
        await self.close()

    async def close(self) -> None:
        """Close this event loop's connection. See `MIIClient.close`."""
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close(None)

    async def __aenter__(self) -> AsyncMIIClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _stream(
        self, request: GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[Response]:
        answer = StreamedAnswer()
        async with contextlib.aclosing(self._messages(request, timeout)) as messages:
            async for message in messages:
                for piece in answer.pieces(message):
                    yield piece

    async def _messages(self, request: GenerateRequest, timeout: float | None) -> Any:
        attempts, patience = Attempts(request), self.patience(timeout)
        while True:
            try:
                call = self._call(attempts.next_request(), patience.remaining)
                async with contextlib.aclosing(call) as messages:
                    async for message in messages:
                        self.reached = True
                        patience.worked()
                        attempts.take(message)
                        yield message
                return
            except (Unavailable, Overloaded) as error:
                if attempts.finished:  # only the end of the call was lost
                    return
                await asyncio.sleep(self.pause_after(error, patience))

    async def _call(
        self, request: GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[GenerateResponse]:
        call = self._stub().Generate(request, timeout=timeout, metadata=self.security.metadata)
        try:
            with self._errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        patience = self.patience(check_timeout(timeout))
        while True:
            try:
                with self._errors():
                    answer = await getattr(self._stub(), method)(
                        request, timeout=patience.remaining, metadata=self.security.metadata
                    )
                self.reached = True
                return answer
            except (Unavailable, Overloaded) as error:
                await asyncio.sleep(self.pause_after(error, patience))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise self.error_of(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled but the call, with its connection.
            raise Cancelled("this client has been closed") from None

    def _stub(self) -> Any:
        from grpc import aio

        from mii.proto.inference_pb2_grpc import InferenceStub

        self.refuse_if_terminated()
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            channel = self.security.open_channel(aio, self.address)
            self._channels[loop] = channel
        return InferenceStub(channel)
