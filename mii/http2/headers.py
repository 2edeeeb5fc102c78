"""Header lists: what may be in them, and how they are written, without state.

What we write uses no dynamic table and no Huffman code: it is as quick as a join, the same block
may go to any connection, and on the loopback and inside a rack its bytes cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from mii.http2.frames import ErrorCode, StreamFault
from mii.http2.header_decoder import Header

# Lower-case token characters of RFC 9110, which is all that a name may have in HTTP/2.
_NAME_BYTES: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
_find_forbidden: Final = re.compile(rb"[\x00\r\n]").search
# They speak of an HTTP/1.1 connection; a block that has them may be meant to smuggle a request.
_CONNECTION_HEADERS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_REQUEST_PSEUDO_HEADERS: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_RESPONSE_PSEUDO_HEADERS: Final = frozenset((b":status",))
_NO_PSEUDO_HEADERS: Final = frozenset[bytes]()


def check_headers(headers: Iterable[Header], *, pseudo: frozenset[bytes]) -> None:
    """Refuse a malformed list (RFC 9113, section 8.2).

    Args:
        headers: the list.
        pseudo: the pseudo-headers that it may have, each at most once and before all others.

    Raises:
        StreamFault: naming what is wrong.
    """
    seen: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name.startswith(b":"):
            if regular or name in seen or name not in pseudo:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"misplaced pseudo-header {name!r}")
            seen.add(name)
        else:
            regular = True
            if not is_name(name) or name in _CONNECTION_HEADERS:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"header {name[:64]!r} is not allowed")
            if name == b"te" and value.lower() != b"trailers":
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "te may only be 'trailers'")
        # Spaces around a value, which RFC 9113 forbids as well, are in order in gRPC's metadata.
        if _find_forbidden(value):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"the value of {name[:64]!r} has a newline")


def check_request(headers: list[Header]) -> None:
    """Refuse the header list of a malformed request.

    Raises:
        StreamFault: naming what is wrong.
    """
    check_headers(headers, pseudo=_REQUEST_PSEUDO_HEADERS)
    names = [name for name, _ in headers]
    for wanted in (b":method", b":scheme", b":path"):
        if wanted not in names:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"a request without {wanted.decode()}")
    if (b":path", b"") in headers:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a request with an empty :path")


def check_trailers(headers: list[Header]) -> None:
    """Refuse the malformed trailers of a request.

    Raises:
        StreamFault: naming what is wrong.
    """
    check_headers(headers, pseudo=_NO_PSEUDO_HEADERS)


def check_response(headers: list[Header], *, trailers: bool) -> None:
    """Refuse the malformed header list of a response, or its trailers.

    Raises:
        StreamFault: naming what is wrong.
    """
    check_headers(headers, pseudo=_NO_PSEUDO_HEADERS if trailers else _RESPONSE_PSEUDO_HEADERS)
    if not trailers and not any(name == b":status" for name, _ in headers):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a response without :status")


@lru_cache(4096)
def is_name(name: bytes) -> bool:
    """Whether a header may be called so."""
    return name != b"" and _NAME_BYTES.issuperset(name)


def encode_headers(headers: Iterable[Header]) -> bytes:
    """Return a block of literals, which leaves the peer's dynamic table as it is."""
    return b"".join(
        b"\x00" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers
    )


def _length(value: int) -> bytes:
    """Return a string's length as an HPACK integer of 7 bits and more, without Huffman's bit."""
    if value < 127:
        return bytes((value,))
    encoded = bytearray((127,))
    value -= 127
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
