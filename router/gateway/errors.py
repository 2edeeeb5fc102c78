"""Errors as HTTP answers, in the OpenAI API's shape."""

from __future__ import annotations

import math
from typing import Any, Final

from aiohttp import web

from mii.errors import (
    Cancelled,
    DeadlineExceeded,
    DeploymentNotFoundError,
    InvalidArgument,
    MIIError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from mii.router.gateway.body import MAX_BODY_BYTES, json_response

# Under which a response has the code of the error that it tells of.
ERROR_CODE: Final = web.ResponseKey("error_code", str)

# An error's status is that of the nearest of its classes that stands here.
_STATUSES: Final[dict[type[MIIError], int]] = {
    InvalidArgument: 400,
    ModelNotFound: 404,
    DeploymentNotFoundError: 404,
    Unauthenticated: 401,
    PermissionDenied: 403,
    Overloaded: 429,
    Cancelled: 499,
    Unavailable: 503,
    DeadlineExceeded: 504,
    MIIError: 500,
}

_RETRY_AFTER: Final = 1.0  # seconds, where the error has no better idea


def http_status(error: MIIError) -> int:
    """Return the HTTP status that tells of `error`."""
    return next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def error_body(error: MIIError) -> dict[str, Any]:
    """Return the JSON object that tells of `error`."""
    return _body(str(error), http_status(error), getattr(error, "field", None), error.code)


def error_response(error: MIIError) -> web.Response:
    """Return the answer that tells of `error`."""
    status = http_status(error)
    headers = {}
    if status in (429, 503):
        seconds = getattr(error, "retry_after", None) or _RETRY_AFTER
        headers["Retry-After"] = str(math.ceil(seconds))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _told(error.code, json_response(error_body(error), status, headers))


def http_error_response(error: web.HTTPException, request: web.Request) -> web.Response:
    """Return what aiohttp itself found wrong, in our shape."""
    here = f"{request.method} {request.path[:200]}"
    headers = {}
    if isinstance(error, web.HTTPNotFound):
        message, code = f"there is nothing at {here}", "not_found"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        headers["Allow"] = allowed
        message, code = f"{here} is not allowed: use {allowed}", "method_not_allowed"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = (
            f"the body is too large: send at most {MAX_BODY_BYTES} bytes, and many prompts in "
            "several requests",
            "request_too_large",
        )
    else:
        message, code = error.reason, "http_error"
    body = _body(message, error.status, None, code)
    return _told(code, json_response(body, error.status, headers))


def _told(code: str, response: web.Response) -> web.Response:
    response[ERROR_CODE] = code
    return response


def _body(message: str, status: int, param: str | None, code: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status)
    if kind is None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
