"""What one end of a connection sends: when it goes out, and when the connection is over.

All that one turn of the event loop sends goes out together. Data waits in its stream while the
peer's windows, or a transport whose buffer is full, hold it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import ClassVar, Final, cast

from mii.http2.frames import (
    DEFAULT_WINDOW,
    MAX_STREAM_ID,
    PREFACE,
    ConnectionFault,
    ErrorCode,
    Setting,
    goaway,
    settings,
    window_update,
)
from mii.http2.limits import Limits
from mii.http2.stream import Loss, Stream

_WRITE_BUFFER_BYTES: Final = 2**18  # in the transport, beyond which data waits in its streams
_FRAMES_PER_TURN: Final = 32  # of streams that have waited: others' frames come in between

_logger = logging.getLogger(__name__)


class Sender(asyncio.Protocol):
    """The sending half of a connection, and its beginning and end.

    Args:
        limits: what the peer may do.
    """

    is_server: ClassVar[bool]

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.time = self.loop.time()  # when the peer was last heard, or took data
        self.streams: dict[int, Stream] = {}
        self.initial_window = DEFAULT_WINDOW  # of the streams that we send on
        self.window = DEFAULT_WINDOW  # bytes that we may send on all streams together
        self.writable = False  # the transport takes data
        self.last_stream = 0  # the highest that the peer has opened
        self.closing = False
        self.table_update = b""  # to begin the next header block with
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._flush_is_due = False
        self._unsent_control = 0  # bytes, since the transport last took data
        self._waiting: dict[Stream, None] = {}  # for room, in order
        self._draining = False
        self._parting: asyncio.Transport | None = None  # see `_part`
        self._parting_timer: asyncio.TimerHandle | None = None

    # What a server and a client do differently.

    def closed(self, message: str) -> None:
        """Note that the connection is over; its streams have been told."""

    # Towards streams.

    def send(self, data: bytes) -> None:
        """Send frames, with all that is sent in this turn of the event loop."""
        self._out.append(data)
        if not self._flush_is_due:
            self._flush_is_due = True
            self.loop.call_soon(self._flush)

    def send_control(self, data: bytes) -> None:
        """Send a frame that no window holds back; ends the connection if the peer reads none."""
        if not self.writable:
            self._unsent_control += len(data)
            if self._unsent_control > self.limits.max_unsent_control_bytes:
                self.abort("the peer does not read")
                return
        self.send(data)

    def header_block(self, block: bytes) -> bytes:
        """Return a header block as it must begin here. Each has to be sent, in this order."""
        if self.table_update:
            block, self.table_update = self.table_update + block, b""
        return block

    def wait_for_room(self, stream: Stream) -> None:
        """Have a stream send what is pending when the connection has room for it."""
        self._waiting[stream] = None

    def sent_end(self, stream: Stream) -> None:
        """Note that a stream has sent its end."""
        if stream.ended_there:
            self.forget(stream)
        elif self.is_server:  # RFC 9113, 8.1: the rest of the request is not wanted
            stream.reset(ErrorCode.NO_ERROR)

    def note_cut_short(self, number: int) -> None:
        """Note that we have reset a stream of which the peer may still send frames."""

    def forget(self, stream: Stream) -> None:
        """Drop a stream; frames that still come for it are ignored."""
        self._waiting.pop(stream, None)
        if self.streams.pop(stream.number, None) is not None and not self.streams and self.closing:
            self.close()

    # Beginning and end.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self.writable = True
        values = {
            Setting.INITIAL_WINDOW_SIZE: self.limits.stream_window,
            Setting.MAX_HEADER_LIST_SIZE: self.limits.max_header_bytes,
        }
        if self.is_server:
            values[Setting.MAX_CONCURRENT_STREAMS] = self.limits.max_streams
        else:
            values[Setting.ENABLE_PUSH] = 0
        opening = b"" if self.is_server else PREFACE
        opening += settings(values)
        if self.limits.connection_window > DEFAULT_WINDOW:
            opening += window_update(0, self.limits.connection_window - DEFAULT_WINDOW)
        self.send(opening)

    def connection_lost(self, error: Exception | None) -> None:
        if self._parting_timer is not None:
            self._parting_timer.cancel()
        self._end(f"the connection broke off{f': {error}' if error else ''}")

    def close(self) -> None:
        """Close when what is on its way has gone out."""
        if self._draining:
            # Now the peer knows which of its last requests we have never seen.
            self.send(goaway(self.last_stream, ErrorCode.NO_ERROR, "the server is stopping"))
        self._part("the connection was closed")

    def abort(self, message: str) -> None:
        """Close at once."""
        transport = self._transport or self._parting
        self._end(message)
        if transport is not None:
            transport.abort()

    def drain(self) -> None:
        """Take no more streams, and close when those under way have ended."""
        if not self.closing and self._transport is not None:
            self.closing = self._draining = True
            # The peer may have opened some that have not arrived: they are served, too.
            self.send(goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR, "the server is stopping"))
            if not self.streams:
                self.close()

    def _fail(self, fault: ConnectionFault) -> None:
        """Tell the peer what it did wrong, and close."""
        _logger.warning("an HTTP/2 connection is closed: %s: %s", fault.code.name, fault)
        self.send(goaway(self.last_stream, fault.code, str(fault)))
        self._part(str(fault))

    def _part(self, message: str) -> None:
        """End the connection, and let the peer read to the end.

        A socket that is closed with unread bytes in it resets the connection, and the peer may
        lose what was sent last. So what comes is read on for a moment, and thrown away.
        """
        self._flush()
        transport = self._transport
        self._end(message)
        if transport is None:
            return
        self._parting = transport
        self._parting_timer = self.loop.call_later(self.limits.parting_seconds, transport.abort)
        if transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer was quicker
                transport.write_eof()
        else:  # TLS
            transport.close()

    def _end(self, message: str) -> None:
        if self._transport is None:
            return
        self._transport = None
        self.writable = False
        self.closing = True
        self._out.clear()
        streams = list(self.streams.values())
        self.streams.clear()
        self._waiting.clear()
        loss = Loss(ErrorCode.CANCEL, message, with_connection=True)
        for stream in streams:
            stream.discard()
            stream.receiver.stream_lost(loss)
        self.closed(message)

    # The transport.

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._transport is not None:
            if self._out:
                self._transport.write(b"".join(self._out))
                self._out.clear()
            if self._waiting and self.window > 0 and self.writable:
                self.loop.call_soon(self._serve_waiting)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        if self._transport is None:
            return
        self.writable = True
        self.time = self.loop.time()
        self._unsent_control = 0
        for stream in [each for each in self._waiting if not each.unsent_bytes]:
            self._waiting.pop(stream, None)
            stream.send_pending()  # its end, which needs no window
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Let streams that wait send, a frame each in turn."""
        frames = _FRAMES_PER_TURN
        while self._waiting and self.window > 0 and self.writable and frames > 0:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            stream.send_pending(frames=1)
            frames -= 1
