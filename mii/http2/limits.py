"""What a peer may do to us, and how much of it.

Each limit answers an attack that has a name: HPACK bombs and CONTINUATION floods
(`max_header_bytes`), rapid reset, PING, SETTINGS and empty-frame floods (`nuisances`), streams and
connections without end, windows that never open and sockets that are never read
(`max_unsent_control_bytes`, and time limits for what stalls).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one connection; times in seconds."""

    max_header_bytes: int = 2**15  # of a block, and of the list that it decodes to
    max_streams: int = 4096  # open at once
    max_message_bytes: int = 128 * 2**20
    stream_window: int = 2**20
    connection_window: int = 2**24  # 65,535 at least
    # Answers to PING and SETTINGS, resets, headers: what we owe a peer that does not read.
    max_unsent_control_bytes: int = 2**20
    # Frames that cost us work and carry nothing: PING, SETTINGS, RST_STREAM, empty DATA...
    nuisances: int = 2000  # at once
    nuisances_per_second: float = 500.0
    preface_seconds: float = 10.0  # from connecting to a whole preface
    headers_seconds: float = 10.0  # from a block's first frame to its last
    request_seconds: float = 120.0  # without a byte of a request that has begun
    ping_seconds: float = 30.0  # of silence, until we ask whether the peer is there
    pong_seconds: float = 20.0  # until it must have answered
    parting_seconds: float = 1.0  # for the peer to read our last words
    housekeeping_seconds: float = 5.0  # between two looks at the clock


class Bucket:
    """A leaky bucket (ITU-T I.371): `size` at once, `per_second` in the long run.

    Args:
        size: at once.
        per_second: how fast it empties.
        now: on the event loop's clock.
    """

    __slots__ = ("_at", "_level", "_per_second", "_size")

    def __init__(self, size: float, per_second: float, now: float) -> None:
        self._size = size
        self._per_second = per_second
        self._level = 0.0
        self._at = now

    def add(self, now: float) -> bool:
        """Add one; return whether the bucket runs over."""
        self._level = max(0.0, self._level - (now - self._at) * self._per_second) + 1.0
        self._at = now
        return self._level > self._size
