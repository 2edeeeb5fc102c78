"""One stream: what is sent on it waits for windows, what comes on it goes to its receiver."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from mii.http2.frames import (
    DEFAULT_WINDOW,
    MAX_FRAME_BYTES,
    ErrorCode,
    Flag,
    FrameType,
    header_frames,
    pack_header,
    rst_stream,
    window_update,
)
from mii.http2.header_decoder import Header

if TYPE_CHECKING:
    from mii.http2.sender import Sender

_FRAMES_AT_ONCE: Final = 16  # of one stream, before others have their turn
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
        """Note that all that was given to the stream has gone out, after it was not `writable`."""


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
        "holds_credit",
        "last_progress",
        "number",
        "receive_window",
        "receiver",
        "unsent_bytes",
        "window",
    )

    def __init__(self, connection: Sender, number: int, receiver: Receiver) -> None:
        self.number = number
        self.receiver = receiver
        self.window = connection.initial_window  # bytes that we may send
        # Before it has read our SETTINGS, a peer may send as much as RFC 9113 allows by default.
        self.receive_window = max(DEFAULT_WINDOW, connection.limits.stream_window)
        self.credit = 0  # bytes of it that have come and that the peer does not have back yet
        self.holds_credit = False  # the receiver has enough for now
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
        """Whether all that was sent has gone out."""
        # Not: whether there is room. Whoever is told no must hear of it when that changes, and
        # where nothing waits nobody would.
        return not self._pending

    @property
    def blocked(self) -> bool:
        """Whether something waits for the peer to take it."""
        return bool(self._pending) or self._last is not None

    @property
    def over(self) -> bool:
        """Whether both sides have sent everything."""
        return self.ended_here and self.ended_there and not self.blocked

    def send_headers(self, block: bytes) -> None:
        """Send a header block that opens what we send."""
        if not self.ended_here:
            block = self._connection.header_block(block)
            self._connection.send_control(header_frames(self.number, block, end_stream=False))

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
            self._push(_FRAMES_AT_ONCE)

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
        if not self.ended_there:
            self._connection.note_cut_short(self.number)
        self._connection.send_control(rst_stream(self.number, code))
        self.discard()

    def hold_credit(self, holds: bool) -> None:
        """Let the peer send no more than its window has left, or go on."""
        self.holds_credit = holds
        if not holds and not self.ended_there:
            self.last_progress = self._connection.loop.time()
            self.return_credit()

    def return_credit(self) -> None:
        """Give the peer's window back what has come, if it is worth a frame."""
        if self.credit * 2 >= self._connection.limits.stream_window:
            self._connection.send_control(window_update(self.number, self.credit))
            self.credit = 0

    def discard(self) -> None:
        """Forget the stream."""
        self.ended_here = self.ended_there = True
        self._pending.clear()
        self._sent = self.unsent_bytes = 0
        self._last = None
        self._connection.forget(self)

    def send_pending(self, frames: int = _FRAMES_AT_ONCE) -> None:
        """Send what the windows allow of what is pending, in so many frames at most."""
        self._push(frames)
        if not self._pending and not self.ended_here:
            self.receiver.resume_writing()

    def _push(self, frames: int) -> None:
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
        if not pending:
            if self._last is not None:
                self._send_last()
        elif self.window > 0:
            connection.wait_for_room(self)

    def _send_last(self) -> None:
        connection = self._connection
        if not connection.writable:  # or a peer that never reads could have us write for ever
            connection.wait_for_room(self)
            return
        last, self._last = self._last, None
        if last:
            block = connection.header_block(last)
            connection.send(header_frames(self.number, block, end_stream=True))
        else:
            connection.send(pack_header(0, 0, _DATA, _END_STREAM, self.number))
        connection.sent_end(self)
