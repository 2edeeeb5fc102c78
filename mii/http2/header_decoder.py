"""HPACK (RFC 7541): header blocks decoded, under a limit.

The tables and Huffman's code are `hpack`'s. Its decoder, which logs each step, takes several times
as long as this one, and as much of a call's time as all the rest of HTTP/2.
"""

from __future__ import annotations

from typing import Final

from hpack.exceptions import HPACKDecodingError, HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from mii.http2.frames import ConnectionFault, ErrorCode

Header = tuple[bytes, bytes]

_MAX_TABLE_BYTES: Final = 4096  # RFC 9113's default: we ask for no other
_ENTRY_BYTES: Final = 32  # that an entry counts besides its strings
_MAX_SHIFT: Final = 28  # of an integer's last byte: none that is allowed is so large


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
        self._max_list_bytes = max_list_bytes
        self._table = HeaderTable()

    def decode(self, block: bytes) -> list[Header]:
        """Return a block's headers.

        Raises:
            HeadersTooLarge: beyond the limit.
            ConnectionFault: if it cannot be decoded. After either the dynamic tables of the two
                ends differ, so that no later block can be.
        """
        try:
            return self._decode(block)
        except IndexError:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "HPACK: a cut block") from None
        except HPACKError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"HPACK: {error}") from None

    def _decode(self, block: bytes) -> list[Header]:
        table = self._table
        headers: list[Header] = []
        position, end, size = 0, len(block), 0
        while position < end:
            first = block[position]
            if first & 0x80:
                index, position = _integer(block, position, 0x7F)
                header = table.get_by_index(index)
            elif first & 0xE0 == 0x20:
                position = self._resize(block, position, late=bool(headers))
                continue
            else:
                index, position = _integer(block, position, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _string(block, position)
                value, position = _string(block, position)
                header = name, value
                if first & 0x40:
                    table.add(name, value)
            headers.append(header)
            size += len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if size > self._max_list_bytes:
                raise HeadersTooLarge("a header list larger than SETTINGS allow")
        return headers

    def _resize(self, block: bytes, position: int, *, late: bool) -> int:
        size, position = _integer(block, position, 0x1F)
        if late:
            raise HPACKDecodingError("the table is resized within a block")
        if size > _MAX_TABLE_BYTES:
            raise HPACKDecodingError(f"a table of {size} bytes")
        self._table.maxsize = size
        return position


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Return the integer (5.1) that begins in some bits of a byte, and what comes after it."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > _MAX_SHIFT:
            raise HPACKDecodingError("an integer of more than 5 bytes")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Return the string (5.2) at a position, and what comes after it."""
    coded = block[position] & 0x80
    length, position = _integer(block, position, 0x7F)
    end = position + length
    string = block[position:end]
    if len(string) != length:
        raise HPACKDecodingError("a cut string")
    return (decode_huffman(string) if coded else string), end
