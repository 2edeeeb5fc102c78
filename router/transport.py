"""The seam between the router and a worker: what the router asks, whatever carries it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # grpc-stubs lacks it
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mii.channel import channel_options
from mii.errors import Leaving, MIIError, Unavailable
from mii.messages import ACCEPTED_KEY
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.proto.worker_pb2_grpc import WorkerStub
from mii.status import ERROR_KEY, error_of_call

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class WorkerCall(Protocol):
    """One Generate call: an iterator over its messages. Errors are those of `mii.errors`."""

    def __aiter__(self) -> WorkerCall:
        """Return itself."""

    async def __anext__(self) -> GenerateResponse:
        """Return the next message, until the worker has ended the call."""

    async def accepted(self) -> None:
        """Return once the worker has found the request valid and has queued it."""

    def cancel(self) -> None:
        """Tell the worker that nobody wants the answer; does nothing after the call's end."""


class WorkerTransport(Protocol):
    """A way to one worker. Errors are those of `mii.errors`; `timeout` is in seconds."""

    def generate(self, request: GenerateRequest, timeout: float | None) -> WorkerCall:
        """Begin a call."""

    async def tokenize(self, request: TokenizeRequest, timeout: float | None) -> TokenizeResponse:
        """Return the ids of a prompt."""

    async def detokenize(
        self, request: DetokenizeRequest, timeout: float | None
    ) -> DetokenizeResponse:
        """Return the text of ids."""

    async def list_models(self, timeout: float | None) -> ListModelsResponse:
        """Return what the worker serves."""

    async def status(self, timeout: float | None) -> StatusResponse:
        """Return the worker's counters."""

    async def healthy(self, timeout: float | None) -> bool:
        """Return whether the worker says that it can answer; never raises."""

    async def close(self) -> None:
        """Give up the connection; calls under way end as cancelled."""


class GrpcTransport:
    """`WorkerTransport` over `grpc.aio`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, channel_options())
        self._inference = InferenceStub(self._channel)
        self._worker = WorkerStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, request: GenerateRequest, timeout: float | None) -> WorkerCall:
        return GrpcCall(self._inference.Generate(request, timeout=timeout))

    async def tokenize(self, request: TokenizeRequest, timeout: float | None) -> TokenizeResponse:
        return await _reply(self._inference.Tokenize, request, timeout)

    async def detokenize(
        self, request: DetokenizeRequest, timeout: float | None
    ) -> DetokenizeResponse:
        return await _reply(self._inference.Detokenize, request, timeout)

    async def list_models(self, timeout: float | None) -> ListModelsResponse:
        return await _reply(self._inference.ListModels, ListModelsRequest(), timeout)

    async def status(self, timeout: float | None) -> StatusResponse:
        return await _reply(self._worker.Status, StatusRequest(), timeout)

    async def healthy(self, timeout: float | None) -> bool:
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await self._health.Check(request, timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._channel.close(None)


class GrpcCall:
    """`WorkerCall` over `grpc.aio`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: GenerateResponse | None = None

    async def accepted(self) -> None:
        try:
            metadata = await self._call.initial_metadata()
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        if any(key == ACCEPTED_KEY for key, _ in metadata):
            return
        first = await self._read()
        self._first = None if first is EOF else first

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> GenerateResponse:
        message, self._first = self._first, None
        if message is None:
            message = await self._read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled but the call, with its channel.
            raise Leaving("the connection to the worker was given up") from None


def _error_of(error: grpc.aio.AioRpcError) -> MIIError:
    """Return what a failed call tells of; a connection that breaks off tells nothing itself."""
    broken = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    metadata: Any = error.trailing_metadata() or ()
    if broken and not any(key == ERROR_KEY for key, _ in metadata):
        return Unavailable(error.details() or "the connection to the worker broke off")
    return error_of_call(error)


async def _reply(
    method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
    request: _Request,
    timeout: float | None,
) -> _Response:
    try:
        return await method(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error) from None
