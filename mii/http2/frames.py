"""Frames as they are on the wire (RFC 9113, sections 4 and 6), and what is wrong with some."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
# Of a payload. Both sides must take this much; we neither send nor ask for more, so that no
# stream's frame keeps the others waiting for long.
MAX_FRAME_BYTES: Final = 16384
DEFAULT_WINDOW: Final = 65535
MAX_WINDOW: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1

_HEADER = struct.Struct(">HBBBI")  # length in two parts, type, flags, stream
_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")

unpack_header: Final = _HEADER.unpack_from
pack_header: Final = _HEADER.pack


class FrameType(IntEnum):
    """What a frame is."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntFlag):
    """Bits of a frame's flags; the meaning depends on its type."""

    NONE = 0
    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """Names of settings."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream or a connection was ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The peer has broken the protocol, or a limit, in a way that ends the connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """The peer has broken the protocol in a way that ends one stream."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: FrameType, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return pack_header(size >> 8, size & 255, kind, flags, stream) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings in a frame's payload, unknown ones included, in their order."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream, _UINT32.pack(increment))


def rst_stream(stream: int, code: int) -> bytes:
    """Return an RST_STREAM frame."""
    return frame(FrameType.RST_STREAM, 0, stream, _UINT32.pack(code))


def goaway(last_stream: int, code: int, message: str = "") -> bytes:
    """Return a GOAWAY frame."""
    debug = message.encode()[:256]
    return frame(FrameType.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + debug)


def uint32(payload: bytes, kind: FrameType) -> int:
    """Return the number that is the whole payload of RST_STREAM or WINDOW_UPDATE."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{kind.name} must have 4 bytes")
    value: int = _UINT32.unpack(payload)[0]
    return value


def header_frames(stream: int, block: bytes, *, end_stream: bool) -> bytes:
    """Return a header block in HEADERS and as many CONTINUATION frames as it takes."""
    flags = int(Flag.END_STREAM if end_stream else Flag.NONE)
    if len(block) <= MAX_FRAME_BYTES:
        return frame(FrameType.HEADERS, flags | Flag.END_HEADERS, stream, block)
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(FrameType.HEADERS, flags, stream, parts[0])]
    frames += [frame(FrameType.CONTINUATION, 0, stream, part) for part in parts[1:-1]]
    frames.append(frame(FrameType.CONTINUATION, Flag.END_HEADERS, stream, parts[-1]))
    return b"".join(frames)


def without_padding(payload: bytes, flags: int) -> bytes:
    """Return what a padded DATA or HEADERS frame carries."""
    if not flags & Flag.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
