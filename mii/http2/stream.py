"""One stream: what is sent on it waits for windows, what comes on it goes to its receiver."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from mii.http2.frames import (
    MAX_FRAME_BYTES,
    ErrorCode,
    Flag,
    FrameType,
    header_frames,
    pack_header,
    rst_stream,
)
from mii.http2.headers import Header

if TYPE_CHECKING:
    from mii.http2.connection import Connection

_DATA: Final = int(FrameType.DATA)
_END_STREAM: Final = int(Flag.END_STREAM)


@dataclass(frozen=True)
class Loss:
    """How a stream came to an end before its time."""

    code: int  # of RST_STREAM or GOAWAY, see `ErrorCode`
    message: str
    with_connection: bool = False  # the connection broke off, and with it all its streams
    unprocessed: bool = False  # the peer says that it has not looked at the request


class Receiver(Protocol):
    """Takes what comes on a stream."""

    def headers_received(self, headers: list[Header], ended: bool) -> None:
        """Take a header list; `ended`: nothing comes after it."""

    def data_received(self, data: bytes, ended: bool) -> None:
        """Take some bytes; `ended`: nothing comes after them."""

    def stream_lost(self, loss: Loss) -> None:
        """Note that nothing more comes, and that nothing sent from now on arrives."""

    def resume_writing(self) -> None:
        """Note that all that was given to the stream has gone out."""


class Stream:
    """One stream of a connection.

    Args:
        connection: its connection.
        number: its id.
        receiver: takes what comes.
    """

    __slots__ = (
        "_connection",
        "_last",
        "_pending",
        "_sent",
        "credit",
        "ended_here",
        "ended_there",
        "last_progress",
        "number",
        "receive_window",
        "receiver",
        "unsent_bytes",
        "window",
    )

    def __init__(self, connection: Connection, number: int, receiver: Receiver) -> None:
        self.number = number
        self.receiver = receiver
        self.window = connection.initial_window  # bytes that we may send
        self.receive_window = connection.limits.stream_window
        self.credit = 0  # bytes that have come and that the peer's window does not have back yet
        self.ended_here = False  # we send nothing more
        self.ended_there = False
        self.unsent_bytes = 0
        self.last_progress = connection.time  # in either direction
        self._connection = connection
        self._pending: deque[bytes] = deque()
        self._sent = 0  # bytes of the first of them
        self._last: bytes | None = None  # header block after what is pending; b"": END_STREAM alone

    @property
    def writable(self) -> bool:
        """Whether what is sent now would go out at once."""
        return not self._pending and self.window > 0 and self._connection.writable

    def send_headers(self, block: bytes) -> None:
        """Send a header block that opens what we send."""
        if not self.ended_here:
            self._connection.send(header_frames(self.number, block, end_stream=False))

    def send(self, data: bytes) -> None:
        """Send data, now or when the peer has room for it. Nothing is sent after the end."""
        size = len(data)
        connection = self._connection
        if (
            not self._pending
            and size <= self.window
            and size <= connection.window
            and size <= MAX_FRAME_BYTES
            and connection.writable
            and not self.ended_here
        ):
            self.window -= size
            connection.window -= size
            connection.send(pack_header(size >> 8, size & 255, _DATA, 0, self.number) + data)
        elif data and not self.ended_here:
            if not self._pending:
                self.last_progress = connection.loop.time()
            self._pending.append(data)
            self.unsent_bytes += size
            self.send_pending()

    def end(self, trailers: bytes = b"") -> None:
        """Send the end, after what is still pending.

        Args:
            trailers: a header block to end with, if any.
        """
        if self.ended_here:
            return
        self.ended_here = True
        self._last = trailers
        if not self._pending:
            self._send_last()

    def reset(self, code: ErrorCode) -> None:
        """End both directions at once. What is pending is dropped; the receiver is told nothing."""
        self.discard()
        self._connection.send_control(rst_stream(self.number, code))

    def discard(self) -> None:
        """Forget the stream."""
        self.ended_here = self.ended_there = True
        self._pending.clear()
        self._sent = self.unsent_bytes = 0
        self._last = None
        self._connection.forget(self)

    def send_pending(self, frames: int = 2**31) -> None:
        """Send what the windows allow of what is pending, in so many frames at most."""
        connection = self._connection
        pending = self._pending
        while pending and frames > 0 and connection.writable:
            begin = self._sent
            first = pending[0]
            size = min(len(first) - begin, self.window, connection.window, MAX_FRAME_BYTES)
            if size <= 0:
                break
            part = first[begin : begin + size]
            self._sent = begin + size
            if self._sent == len(first):
                pending.popleft()
                self._sent = 0
            self.window -= size
            connection.window -= size
            self.unsent_bytes -= size
            self.last_progress = connection.time
            connection.send(pack_header(size >> 8, size & 255, _DATA, 0, self.number) + part)
            frames -= 1
        if pending:
            connection.wait_for_room(self)
        elif self._last is not None:
            self._send_last()
        else:
            self.receiver.resume_writing()

    def _send_last(self) -> None:
        last, self._last = self._last, None
        if last:
            self._connection.send(header_frames(self.number, last, end_stream=True))
        else:
            self._connection.send(pack_header(0, 0, _DATA, _END_STREAM, self.number))
        self._connection.sent_end(self)
