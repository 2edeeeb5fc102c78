"""The seam between the router and a worker: what the router asks, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from mii import traces
from mii.errors import Leaving, MIIError, Unavailable
from mii.http2.client import Channel, Metadata
from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.limits import Limits
from mii.messages import ACCEPTED_KEY
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mii.proto.worker_pb2 import (
    HoldingRequest,
    HoldingResponse,
    StatusRequest,
    StatusResponse,
)
from mii.status import ERROR_KEY, error_of_fault

# A worker is one of ours: what it may do to us is bounded by what we ask of it.
_LIMITS: Final = Limits(nuisances=2**31, stream_window=2**22, connection_window=2**26)

_Response = TypeVar("_Response", bound=Message)


class WorkerTransport(Protocol):
    """A way to one worker. Errors are those of `mii.errors`; `timeout` is in seconds."""

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float | None,
        on_accepted: Callable[[], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        """Make a call; return when the worker has ended it. A cancellation cancels it there, too.

        Args:
            request: what is asked.
            timeout: until nobody waits for the answer any more.
            on_accepted: is called when the worker has found the request valid and has queued it.
            on_message: is called with each message, later, a serialised GenerateResponse; what it
                raises ends the call.
        """

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

    async def holding(self, request_ids: Sequence[str], timeout: float | None) -> Sequence[str]:
        """Return which of some requests the worker holds for clients that ask again."""

    async def healthy(self, timeout: float | None) -> bool:
        """Return whether the worker says that it can answer; never raises."""

    async def close(self) -> None:
        """Give up the connection; calls under way end as `Leaving`."""


class Http2Transport:
    """`WorkerTransport` over `mii.http2`.

    Args:
        address: the worker's.
        metadata: sent with every call.
    """

    def __init__(self, address: str, metadata: Metadata = ()) -> None:
        self._channel = Channel(address, limits=_LIMITS, metadata=metadata)
        self._closed = False

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float | None,
        on_accepted: Callable[[], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        accepted = False

        def accept() -> None:
            nonlocal accepted
            accepted = True
            on_accepted()

        def headers_came(headers: dict[str, str]) -> None:
            if ACCEPTED_KEY in headers:
                accept()

        def message_came(body: bytes) -> None:
            if not accepted:
                accept()
            on_message(body)

        try:
            call = await self._channel.call(
                "/mii.v1.Inference/Generate",
                request.SerializeToString(),
                message_came,
                timeout=timeout,
                metadata=traces.outgoing(),
                on_headers=headers_came,
            )
            await call.wait()
        except CallFault as fault:
            raise self._error_of(fault) from None
        if not accepted:
            accept()

    async def tokenize(self, request: TokenizeRequest, timeout: float | None) -> TokenizeResponse:
        return await self._ask("mii.v1.Inference/Tokenize", request, TokenizeResponse, timeout)

    async def detokenize(
        self, request: DetokenizeRequest, timeout: float | None
    ) -> DetokenizeResponse:
        return await self._ask("mii.v1.Inference/Detokenize", request, DetokenizeResponse, timeout)

    async def list_models(self, timeout: float | None) -> ListModelsResponse:
        method = "mii.v1.Inference/ListModels"
        return await self._ask(method, ListModelsRequest(), ListModelsResponse, timeout)

    async def status(self, timeout: float | None) -> StatusResponse:
        return await self._ask("mii.v1.Worker/Status", StatusRequest(), StatusResponse, timeout)

    async def holding(self, request_ids: Sequence[str], timeout: float | None) -> Sequence[str]:
        request = HoldingRequest(request_ids=request_ids)
        method = "mii.v1.Worker/Holding"
        return (await self._ask(method, request, HoldingResponse, timeout)).request_ids

    async def healthy(self, timeout: float | None) -> bool:
        method = "grpc.health.v1.Health/Check"
        try:
            answer = await self._ask(method, HealthCheckRequest(), HealthCheckResponse, timeout)
        except MIIError:
            return False
        return bool(answer.status == HealthCheckResponse.SERVING)

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def _ask(
        self, method: str, request: Message, answer: type[_Response], timeout: float | None
    ) -> _Response:
        body = request.SerializeToString()
        try:
            return answer.FromString(await self._channel.unary(f"/{method}", body, timeout=timeout))
        except CallFault as fault:
            raise self._error_of(fault) from None

    def _error_of(self, fault: CallFault) -> MIIError:
        """Return what a failed call tells of; a connection that breaks off tells nothing itself."""
        told = any(key == ERROR_KEY for key, _ in fault.metadata)
        if self._closed and not told:
            return Leaving("the connection to the worker was given up")
        if fault.code in (StatusCode.INTERNAL, StatusCode.CANCELLED) and not told:
            return Unavailable(fault.message or "the connection to the worker broke off")
        return error_of_fault(fault)
