"""gRPC over HTTP/2 as it is on the wire: messages, statuses, deadlines.

The reference is PROTOCOL-HTTP2.md of the gRPC project.
"""

from __future__ import annotations

import math
import struct
import zlib
from enum import IntEnum
from typing import Final
from urllib.parse import unquote

from mii.http2.header_decoder import Header
from mii.http2.headers import is_name

CONTENT_TYPE: Final = b"application/grpc"
COMPRESSIONS: Final = ("identity", "gzip", "deflate")  # that we read; we write none

_PREFIX: Final = struct.Struct(">BI")  # whether it is compressed, and its length
_PREFIX_BYTES: Final = _PREFIX.size
_unpack_prefix: Final = _PREFIX.unpack_from
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_TIMEOUT_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_TIMEOUT_DIGITS: Final = 8
_PLAIN: Final = frozenset(range(0x20, 0x7F)) - {ord("%")}


class StatusCode(IntEnum):
    """How a call ended."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallFault(Exception):
    """What ends a call with a status."""

    def __init__(self, code: int, message: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = metadata


class MessageReader:
    """Puts messages together from the bytes of a stream.

    Args:
        max_bytes: of a message, unpacked.
        compression: the stream's `grpc-encoding`.

    Raises:
        CallFault: if the compression is unknown.
    """

    __slots__ = ("_buffer", "_compression", "_max_bytes", "_wanted")

    def __init__(self, max_bytes: int, compression: str = "identity") -> None:
        if compression not in COMPRESSIONS:
            raise CallFault(
                StatusCode.UNIMPLEMENTED,
                f"grpc-encoding {compression[:64]!r} is not known here: use one of "
                f"{', '.join(COMPRESSIONS)}",
                (("grpc-accept-encoding", ",".join(COMPRESSIONS)),),
            )
        self._max_bytes = max_bytes
        self._compression = compression
        self._buffer: bytes | bytearray = b""
        self._wanted = _PREFIX_BYTES  # bytes that the next message takes, as far as is known

    @property
    def held_bytes(self) -> int:
        """Of a message that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes of the stream; return the messages that are whole now.

        Raises:
            CallFault: for a message that is too large, or cannot be unpacked.
        """
        if self._buffer:
            # Grown in place, so that a large message is not copied for each of its frames.
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data
            if len(self._buffer) < self._wanted:
                return []
            data = bytes(self._buffer)
        messages: list[bytes] = []
        position, size = 0, len(data)
        self._wanted = _PREFIX_BYTES
        while size - position >= _PREFIX_BYTES:
            flag, length = _unpack_prefix(data, position)
            if length > self._max_bytes:
                raise self._too_large(f"{length}")
            begin = position + _PREFIX_BYTES
            end = begin + length
            if end > size:
                self._wanted = _PREFIX_BYTES + length
                break
            body = data[begin:end]
            messages.append(self._unpacked(flag, body) if flag else body)
            position = end
        self._buffer = data[position:]
        return messages

    def _unpacked(self, flag: int, body: bytes) -> bytes:
        if flag != 1 or self._compression == "identity":
            raise CallFault(StatusCode.INTERNAL, "a message is marked as compressed and is not")
        unpacker = zlib.decompressobj(_WINDOW_BITS[self._compression])
        try:
            unpacked = unpacker.decompress(body, self._max_bytes + 1)
        except zlib.error as error:
            raise CallFault(StatusCode.INTERNAL, f"a message cannot be unpacked: {error}") from None
        if len(unpacked) > self._max_bytes:
            raise self._too_large("unpacked more")
        if not unpacker.eof:
            raise CallFault(StatusCode.INTERNAL, "a compressed message is cut off")
        return unpacked

    def _too_large(self, size: str) -> CallFault:
        # The words "larger than max" are C-core's, by which clients know it from a full queue.
        return CallFault(
            StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._max_bytes})",
        )


def frame_message(body: bytes) -> bytes:
    """Return a message with its prefix."""
    return _PREFIX.pack(0, len(body)) + body


def encode_message_text(text: str) -> bytes:
    """Return a status message as `grpc-message` carries it."""
    return b"".join(
        bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in text.encode()
    )


def decode_message_text(value: bytes) -> str:
    """Return the status message that `grpc-message` carries."""
    return unquote(value.decode("latin-1"), errors="replace")


def metadata_block(metadata: tuple[tuple[str, str], ...]) -> list[Header]:
    """Return metadata as headers.

    Raises:
        ValueError: if a key cannot be a header's name, or a value is not printable ASCII.
    """
    for key, value in metadata:
        if not is_name(key.encode()):
            raise ValueError(f"metadata {key[:64]!r}: keys have lower-case letters, digits, - _ .")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"metadata {key} = {value[:64]!r} is not printable ASCII")
    return [(key.encode(), value.encode()) for key, value in metadata]


def parse_timeout(value: str) -> float:
    """Return the seconds that a `grpc-timeout` allows.

    Raises:
        CallFault: if it is malformed.
    """
    digits, unit = value[:-1], value[-1:]
    if not (digits.isascii() and digits.isdigit()) or unit not in _TIMEOUT_UNITS:
        raise CallFault(StatusCode.INTERNAL, f"grpc-timeout {value[:32]!r} is malformed")
    if len(digits) > _MAX_TIMEOUT_DIGITS:
        raise CallFault(StatusCode.INTERNAL, f"grpc-timeout {value[:32]!r} has over 8 digits")
    return int(digits) * _TIMEOUT_UNITS[unit]


def format_timeout(seconds: float) -> bytes:
    """Return a `grpc-timeout` for some seconds, rounded up."""
    for unit in ("u", "m", "S", "M"):
        count = math.ceil(max(0.0, seconds) / _TIMEOUT_UNITS[unit])
        if count < 10**_MAX_TIMEOUT_DIGITS:
            return f"{count}{unit}".encode()
    return b"99999999H"
