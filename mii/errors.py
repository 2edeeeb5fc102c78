"""Every error that a user can meet.

    MIIError
    ├── InvalidArgument            a value outside its type or range (INVALID_ARGUMENT, 400)
    │   ├── UnknownArgument        a name that nothing knows; suggests the nearest known one
    │   ├── ModelNotFound          a model that the deployment does not serve (NOT_FOUND, 404)
    │   └── ContextLengthExceeded  prompt or prompt + wanted tokens beyond the context
    ├── ModelError                 a model that cannot be found, read or run
    │   └── UnsupportedModel       a family, dtype or quantisation that there is no code for
    ├── DeploymentError            a deployment that cannot start or has failed
    │   ├── PortInUse
    │   └── DeploymentNotFoundError
    └── ServiceError               an answer that did not come
        ├── Unavailable            nobody is there to answer; try again later (UNAVAILABLE, 503)
        │   └── Leaving            the one asked is about to end, as it was told to
        ├── Unauthenticated        no key, or an unknown one (UNAUTHENTICATED, 401)
        ├── PermissionDenied       the key is not one for this (PERMISSION_DENIED, 403)
        ├── Overloaded             a queue is full; try again later (RESOURCE_EXHAUSTED, 429)
        ├── SlowReader             too much of a stream is left unread (RESOURCE_EXHAUSTED)
        ├── DeadlineExceeded       the caller's deadline passed (DEADLINE_EXCEEDED, 504)
        ├── Cancelled              the caller cancelled (CANCELLED, 499)
        └── InternalError          a fault of ours (INTERNAL, 500)

`code` is a stable word for logs, metrics and the OpenAI error body.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator


class MIIError(Exception):
    """Base of all errors raised by mii."""

    code = "error"


class InvalidArgument(MIIError, ValueError):
    """A value that is not allowed. `field` names it, in the caller's spelling."""

    code = "invalid_argument"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> InvalidArgument:
        """Build the usual message: the field, the value (shortened), and what is allowed."""
        return cls(f"{field} = {shorten(value)} is not allowed: it must be {allowed}", field)


class UnknownArgument(InvalidArgument):
    """An argument name that is not known."""

    code = "unknown_argument"

    @classmethod
    def named(cls, name: str, known: Iterable[str], where: str) -> UnknownArgument:
        """Build the message for `name`, which `where` (such as "serve()") does not take."""
        near = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return cls(f"{where} has no argument {shorten(name)}{hint}", name)


class ModelNotFound(InvalidArgument):
    """A model name that the deployment does not serve."""

    code = "model_not_found"


class ContextLengthExceeded(InvalidArgument):
    """A prompt, or a prompt with its wanted new tokens, that the context cannot hold."""

    code = "context_length_exceeded"


class ModelError(MIIError, RuntimeError):
    """A model that cannot be found, read or run."""

    code = "model_error"


class UnsupportedModel(ModelError):
    """A model of a kind that mii has no code for."""

    code = "unsupported_model"


class DeploymentError(MIIError, RuntimeError):
    """A deployment that cannot start or has failed."""

    code = "deployment_error"


class PortInUse(DeploymentError):
    """A port that another process holds."""

    code = "port_in_use"


class DeploymentNotFoundError(DeploymentError):
    """No deployment of that name or address is running."""

    code = "deployment_not_found"


class ServiceError(MIIError, RuntimeError):
    """An answer that did not come."""

    code = "service_error"


class Unavailable(ServiceError):
    """Nobody is there to answer."""

    code = "unavailable"


class Leaving(Unavailable):
    """The one asked is about to end in an orderly way."""

    code = "leaving"


class Unauthenticated(ServiceError):
    """No key, or an unknown one."""

    code = "unauthenticated"


class PermissionDenied(ServiceError):
    """The key is known, and not one for this."""

    code = "permission_denied"


class Overloaded(ServiceError):
    """A queue is full. `retry_after` is in seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlowReader(ServiceError):
    """The client reads its stream so slowly that too much of it has piled up."""

    code = "slow_reader"


class DeadlineExceeded(ServiceError):
    """The caller's deadline passed before the answer was whole."""

    code = "deadline_exceeded"


class Cancelled(ServiceError):
    """The caller cancelled the request."""

    code = "cancelled"


class InternalError(ServiceError):
    """A fault of ours; the message says where the log is."""

    code = "internal_error"


def _kinds(kind: type[MIIError]) -> Iterator[type[MIIError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


ERRORS_BY_CODE = {kind.code: kind for kind in _kinds(MIIError)}


class _ShortRepr(reprlib.Repr):
    """repr() whose cost is bounded, also for huge integers and deep or long containers."""

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:
            return f"an integer of {value.bit_length()} bits"
        return repr(value)


def shorten(value: object, limit: int = 80) -> str:
    """Return a printable, ASCII-safe form of a user's value that is never longer than `limit`.

    Never raises, and large values are cut before they are formatted, so that a 100 MB string
    costs nothing.
    """
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > 16:
        return f"a {type(value).__name__} of {len(value)} items"
    form = _ShortRepr()
    form.maxlist = form.maxtuple = form.maxdict = form.maxset = form.maxfrozenset = 16
    form.maxstring = form.maxother = limit
    try:
        text = form.repr(value[:limit] if isinstance(value, bytes) else value)
    except Exception:  # a __repr__ that fails
        text = f"a value of type {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."
