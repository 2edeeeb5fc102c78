"""JSON bodies, read and written."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

import msgspec
from aiohttp import web

from mii.errors import InvalidArgument, shorten
from mii.messages import MAX_JSON_BYTES

# Read in one go, between other requests' tokens.
MAX_BODY_BYTES: Final = MAX_JSON_BYTES

_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_ASCII = re.compile("[^\x00-\x7f]+")


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read a request's body, which must be a JSON object, whatever its content type says.

    Raises:
        InvalidArgument: for a body that is no JSON object.
        HTTPRequestEntityTooLarge: beyond `MAX_BODY_BYTES`.
    """
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidArgument(f"send JSON as UTF-8: its charset cannot be {shorten(charset)}")
    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise InvalidArgument(f"the body cannot be read: {error}") from None
    value = decode(data)
    if not isinstance(value, dict):
        raise InvalidArgument("the body must be a JSON object: {...}")
    return value


def decode(data: bytes) -> object:
    """Return the value of a JSON text. Lone surrogates in it become U+FFFD.

    Raises:
        InvalidArgument: if it is not JSON.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None
    except msgspec.DecodeError as error:
        reason = error
    # msgspec refuses lone surrogates, which real clients send when they cut text in the middle of
    # an emoji; the standard library reads them.
    try:
        value = json.loads(data, parse_constant=_refuse, parse_float=_finite)
        return _without_surrogates(value)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"the body is not JSON: {reason}") from None


def encode(value: object) -> bytes:
    """Return `value` as JSON in ASCII: some clients split lines at U+2028 and the like."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], data.decode()).encode()


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(
        body=encode(value), status=status, headers=headers, content_type="application/json"
    )


def encode_again(value: object) -> str:
    """Return what `decode` returned, or a part of it, as JSON in ASCII.

    Raises:
        InvalidArgument: if it is nested too deeply.
    """
    try:
        return json.dumps(value)  # which writes integers of any size, as `decode` reads them
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(number)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
