"""Errors on the wire: `mii.errors` to gRPC status and back, for router, workers and clients alike.

A status carries the error's stable word in the trailing metadata `mii-error`, the argument that it
names in `mii-field` (percent-encoded) and a hint in seconds in `retry-after`, so that the other
side raises the same class with the same attributes. Statuses of other servers, without that
metadata, are read by their code alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

import grpc

from mii.errors import (
    ERRORS_BY_CODE,
    Cancelled,
    DeadlineExceeded,
    DeploymentError,
    DeploymentNotFoundError,
    InternalError,
    InvalidArgument,
    MIIError,
    ModelError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    ServiceError,
    SlowReader,
    Unauthenticated,
    Unavailable,
)
from mii.http2.grpc_wire import CallFault

ERROR_KEY: Final = "mii-error"
FIELD_KEY: Final = "mii-field"
RETRY_AFTER_KEY: Final = "retry-after"

# C-core refuses trailers beyond 8 KiB, and percent-encoding takes 3 bytes for some ASCII
# characters, and 12 for some others.
_MAX_ASCII_MESSAGE, _MAX_MESSAGE = 2000, 500
_MAX_FIELD = 100

_Code = grpc.StatusCode

# An error's status is that of the nearest of its classes that stands here.
_CODES: dict[type[MIIError], grpc.StatusCode] = {
    InvalidArgument: _Code.INVALID_ARGUMENT,
    ModelNotFound: _Code.NOT_FOUND,
    ModelError: _Code.FAILED_PRECONDITION,
    DeploymentError: _Code.FAILED_PRECONDITION,
    DeploymentNotFoundError: _Code.NOT_FOUND,
    Unavailable: _Code.UNAVAILABLE,
    Unauthenticated: _Code.UNAUTHENTICATED,
    PermissionDenied: _Code.PERMISSION_DENIED,
    Overloaded: _Code.RESOURCE_EXHAUSTED,
    SlowReader: _Code.RESOURCE_EXHAUSTED,
    DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    Cancelled: _Code.CANCELLED,
    MIIError: _Code.INTERNAL,
}

_BY_STATUS: dict[grpc.StatusCode, type[MIIError]] = {
    _Code.INVALID_ARGUMENT: InvalidArgument,
    _Code.OUT_OF_RANGE: InvalidArgument,
    _Code.FAILED_PRECONDITION: ServiceError,
    _Code.NOT_FOUND: ServiceError,
    _Code.UNIMPLEMENTED: ServiceError,
    _Code.UNAUTHENTICATED: Unauthenticated,
    _Code.PERMISSION_DENIED: PermissionDenied,
    _Code.UNAVAILABLE: Unavailable,
    _Code.RESOURCE_EXHAUSTED: Overloaded,
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.CANCELLED: Cancelled,
}

_BY_NUMBER: Final = {code.value[0]: code for code in _Code}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """A gRPC status: what a server ends a call with."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: MIIError) -> Status:
    """Return the status that tells a client of `error`."""
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    metadata = [(ERROR_KEY, error.code)]
    field = getattr(error, "field", None)
    if field is not None:
        metadata.append((FIELD_KEY, quote(str(field)[:_MAX_FIELD], safe="", errors="replace")))
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        metadata.append((RETRY_AFTER_KEY, f"{retry_after:g}"))
    return Status(code, _printable(str(error)), tuple(metadata))


def error_of(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, Any]] = ()
) -> MIIError:
    """Return the error that a status tells of."""
    values = {key: value for key, value in metadata if isinstance(value, str)}
    kind = ERRORS_BY_CODE.get(values.get(ERROR_KEY, ""))
    if kind is None and code is _Code.RESOURCE_EXHAUSTED and "larger than max" in message:
        # C-core's words, the only sign by which it tells a large message from a full queue.
        return InvalidArgument(f"the message is too large: {message}")
    kind = kind or _BY_STATUS.get(code, InternalError)
    message = message or f"the call ended with status {code.name}"
    if issubclass(kind, InvalidArgument):
        field = values.get(FIELD_KEY)
        return kind(message, None if field is None else unquote(field))
    if issubclass(kind, Overloaded):
        return kind(message, _seconds(values.get(RETRY_AFTER_KEY)))
    return kind(message)


def error_of_call(error: grpc.RpcError) -> MIIError:
    """Return the error that a failed call, of `grpc` or of `grpc.aio`, tells of."""
    call: Any = error
    return error_of(call.code(), call.details() or "", call.trailing_metadata() or ())


def error_of_fault(fault: CallFault) -> MIIError:
    """Return the error that a failed call of `mii.http2` tells of."""
    code = _BY_NUMBER.get(fault.code, _Code.UNKNOWN)
    return error_of(code, fault.message, fault.metadata)


def known_error(error: BaseException, request_id: str) -> MIIError:
    """Return `error` as one of ours. What nobody foresaw is logged, and its words stay in the log.

    Args:
        error: whatever was raised while a request was served.
        request_id: under which the log tells of it.
    """
    if isinstance(error, MIIError):
        return error
    if isinstance(error, grpc.RpcError):
        return error_of_call(error)
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the request was cancelled")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the request's deadline passed")
    _logger.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
    return InternalError(f"internal error: the server's log has it under request id {request_id}")


def _printable(message: str) -> str:
    limit = _MAX_ASCII_MESSAGE if message.isascii() else _MAX_MESSAGE
    text = message if len(message) <= limit else message[: limit - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text) if text else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
