"""Header blocks: decoded by `hpack` under limits, written without state.

What we write uses no dynamic table and no Huffman code: it is as quick as a join, the same block
may go to any connection, and on the loopback and inside a rack its bytes cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from mii.http2.frames import ConnectionFault, ErrorCode, StreamFault

Header = tuple[bytes, bytes]

# Lower-case token characters of RFC 9110, which is all that a name may have in HTTP/2.
_NAME_BYTES: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
_FORBIDDEN_IN_VALUES: Final = frozenset(b"\x00\r\n")
# They speak of an HTTP/1.1 connection; a block that has them may be meant to smuggle a request.
_CONNECTION_HEADERS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_REQUEST_PSEUDO_HEADERS: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_RESPONSE_PSEUDO_HEADERS: Final = frozenset((b":status",))
_NO_PSEUDO_HEADERS: Final = frozenset[bytes]()


class HeadersTooLarge(ConnectionFault):
    """A header list beyond the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.ENHANCE_YOUR_CALM, message)


class HeaderDecoder:
    """Decodes the blocks of one connection, in the order in which they came.

    Args:
        max_list_bytes: of a decoded block, counted as RFC 9113 does: 32 for each header besides.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_list_bytes)

    def decode(self, block: bytes) -> list[Header]:
        """Return a block's headers.

        Raises:
            HeadersTooLarge: beyond the limit.
            ConnectionFault: if it cannot be decoded. After either the dynamic tables of the two
                ends differ, so that no later block can be.
        """
        try:
            headers = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise HeadersTooLarge("a header list larger than SETTINGS allow") from None
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"HPACK: {error}") from None
        return [(bytes(name), bytes(value)) for name, value in headers]


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
            if not name or not is_name(name) or name in _CONNECTION_HEADERS:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"header {name[:64]!r} is not allowed")
            if name == b"te" and value.lower() != b"trailers":
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "te may only be 'trailers'")
        # Spaces around a value, which RFC 9113 forbids as well, are in order in gRPC's metadata.
        if not _FORBIDDEN_IN_VALUES.isdisjoint(value):
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
    return _NAME_BYTES.issuperset(name)


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
