"""Methods with protobuf messages, as `mii.http2.server.Server` takes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from mii.errors import InvalidArgument
from mii.http2.grpc_wire import CallFault
from mii.http2.server_call import Handler, ServerCall
from mii.messages import new_request_id
from mii.status import known_error, status_of

_Request = TypeVar("_Request", bound=Message)


def answered_once(
    request_type: type[_Request], method: Callable[[_Request, ServerCall], Awaitable[Message]]
) -> Handler:
    """Return the handler of a method that answers a message by a message."""

    async def handle(call: ServerCall) -> None:
        response = await method(await _only_message(call, request_type), call)
        call.send(response.SerializeToString())

    return handle


def answered_by_stream(
    request_type: type[_Request], method: Callable[[_Request, ServerCall], Awaitable[None]]
) -> Handler:
    """Return the handler of a method that answers a message by what it sends on the call."""

    async def handle(call: ServerCall) -> None:
        await method(await _only_message(call, request_type), call)

    return handle


async def _only_message(call: ServerCall, request_type: type[_Request]) -> _Request:
    body = await call.receive_only()
    try:
        return request_type.FromString(body)
    except DecodeError as error:
        name = request_type.DESCRIPTOR.full_name
        raise fault_of(InvalidArgument(f"the request is no {name}: {error}")) from None


def fault_of(error: Exception, request_id: str = "") -> CallFault:
    """Return what ends a call whose handler has raised `error`.

    Args:
        error: of `mii.errors`, or one that nobody foresaw: that is logged.
        request_id: under which the log tells of it.
    """
    if isinstance(error, CallFault):
        return error
    status = status_of(known_error(error, request_id or new_request_id()))
    return CallFault(status.code.value[0], status.message, status.metadata)


@contextmanager
def errors_as_status(request_id: str) -> Iterator[None]:
    """End the call with the right status when the block raises."""
    try:
        yield
    except Exception as error:
        raise fault_of(error, request_id) from error
