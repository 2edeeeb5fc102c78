"""One HTTP/2 connection: frames, windows, limits. What both ends have in common."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import ClassVar, Final, cast

from mii.http2.frames import (
    DEFAULT_WINDOW,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_STREAM_ID,
    MAX_WINDOW,
    PREFACE,
    ConnectionFault,
    ErrorCode,
    Flag,
    FrameType,
    Setting,
    StreamFault,
    frame,
    goaway,
    read_settings,
    rst_stream,
    settings,
    uint32,
    unpack_header,
    window_update,
    without_padding,
)
from mii.http2.headers import Header, HeaderDecoder, HeadersTooLarge
from mii.http2.limits import Bucket, Limits
from mii.http2.stream import Loss, Stream

_DATA: Final = int(FrameType.DATA)
_HOUSEKEEPING_SECONDS: Final = 5.0
_WRITE_BUFFER_BYTES: Final = 2**18  # in the transport, beyond which data waits in its streams

_logger = logging.getLogger(__name__)


class _OpenBlock:
    """A header block whose CONTINUATION frames are still to come."""

    def __init__(self, stream: int, flags: int, fragment: bytes, now: float) -> None:
        self.stream = stream
        self.flags = flags
        self.fragments = [fragment]
        self.size = len(fragment)
        self.began = now


class Connection(asyncio.Protocol):
    """One end of a connection.

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
        self.peer_max_streams = MAX_STREAM_ID
        self._transport: asyncio.Transport | None = None
        self._rest = b""  # of what was read: part of a frame
        self._out: list[bytes] = []
        self._flush_is_due = False
        self._unsent_control = 0  # bytes, since the transport last took data
        self._waiting: dict[Stream, None] = {}  # for the connection's window, in order
        self._decoder = HeaderDecoder(limits.max_header_bytes)
        self._block: _OpenBlock | None = None
        self._deaf = False  # header blocks are skipped: see `_hear_no_more`
        self._receive_window = limits.connection_window
        self._credit = 0
        self._nuisances = Bucket(limits.nuisances, limits.nuisances_per_second, self.time)
        self._began = self.time
        self._preface_is_due = self.is_server
        self._settings_are_due = True
        self._pinged = 0.0  # when we asked whether the peer is there; 0: it has answered
        self._housekeeper: asyncio.TimerHandle | None = None

    # What a server and a client do differently.

    @abstractmethod
    def headers_received(self, number: int, headers: list[Header], ended: bool) -> None:
        """Take a decoded header list.

        Raises:
            ConnectionFault, StreamFault: if it may not be.
        """

    def closed(self, message: str) -> None:
        """Note that the connection is gone; its streams have been told."""

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

    def wait_for_room(self, stream: Stream) -> None:
        """Have a stream send what is pending when the connection has room again."""
        if self.window <= 0 or not self.writable:
            self._waiting[stream] = None

    def sent_end(self, stream: Stream) -> None:
        """Note that a stream has sent its end."""
        if stream.ended_there:
            self.forget(stream)
        elif self.is_server:  # RFC 9113, 8.1: the rest of the request is not wanted
            stream.reset(ErrorCode.NO_ERROR)

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
            Setting.MAX_CONCURRENT_STREAMS: self.limits.max_streams,
        }
        if not self.is_server:
            values = values | {Setting.ENABLE_PUSH: 0}
            del values[Setting.MAX_CONCURRENT_STREAMS]
        opening = b"" if self.is_server else PREFACE
        opening += settings(values)
        opening += window_update(0, self.limits.connection_window - DEFAULT_WINDOW)
        self.send(opening)
        self._housekeeper = self.loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection broke off{f': {error}' if error else ''}")

    def close(self) -> None:
        """Close when what is on its way has gone out."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, message: str) -> None:
        """Close at once."""
        transport = self._transport
        self._end(message)
        if transport is not None:
            transport.abort()

    def drain(self) -> None:
        """Take no more streams, and close when those under way have ended."""
        if not self.closing and self._transport is not None:
            self.closing = True
            # The peer may have opened some that have not arrived: they are served, too.
            self.send(goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR, "the server is stopping"))
            if not self.streams:
                self.close()

    def _end(self, message: str, code: int = ErrorCode.CANCEL) -> None:
        if self._transport is None:
            return
        self._transport = None
        self.writable = False
        self.closing = True
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        streams = list(self.streams.values())
        self.streams.clear()
        self._waiting.clear()
        for stream in streams:
            stream.discard()
            stream.receiver.stream_lost(Loss(code, message, with_connection=True))
        self.closed(message)

    def _fail(self, fault: ConnectionFault) -> None:
        """Tell the peer what it did wrong, and close."""
        _logger.warning("an HTTP/2 connection is closed: %s: %s", fault.code.name, fault)
        self.send(goaway(self.last_stream, fault.code, str(fault)))
        self._flush()
        transport = self._transport
        self._end(str(fault))
        if transport is not None:
            transport.close()

    # Writing.

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        if self._transport is None:
            return
        self.writable = True
        self.time = self.loop.time()
        self._unsent_control = 0
        for stream in list(self.streams.values()):
            if stream.unsent_bytes:
                self._waiting[stream] = None
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Let streams that wait send, a frame each in turn."""
        while self._waiting and self.window > 0 and self.writable:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            stream.send_pending(frames=1)
            if stream.unsent_bytes and stream.window > 0:
                self._waiting[stream] = None

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self.time = self.loop.time()
        buffer = self._rest + data if self._rest else data
        try:
            if self._preface_is_due:
                position = self._read_preface(buffer)
                if position == 0:
                    self._rest = buffer
                    return
                buffer = buffer[position:]
            read = self._read_frames(buffer)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        self._rest = buffer[read:]

    def _read_preface(self, buffer: bytes) -> int:
        if len(buffer) >= len(PREFACE):
            if not buffer.startswith(PREFACE):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
            self._preface_is_due = False
            return len(PREFACE)
        if not PREFACE.startswith(buffer):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        return 0

    def _read_frames(self, buffer: bytes) -> int:
        """Read all whole frames; return how many bytes they are."""
        position, size = 0, len(buffer)
        while size - position >= HEADER_BYTES:
            high, low, kind, flags, number = unpack_header(buffer, position)
            length = high << 8 | low
            if length > MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            begin = position + HEADER_BYTES
            end = begin + length
            if end > size:
                break
            number &= MAX_STREAM_ID
            try:
                if kind == _DATA and self._block is None:
                    self._on_data(number, flags, buffer[begin:end])
                else:
                    self._on_other(kind, number, flags, buffer[begin:end])
            except StreamFault as fault:
                self._fail_stream(number, fault)
            if self._transport is None:
                return size
            position = end
        return position

    def _fail_stream(self, number: int, fault: StreamFault) -> None:
        self._count_nuisance()
        stream = self.streams.get(number)
        if stream is None:
            self.send_control(rst_stream(number, fault.code))
            return
        stream.reset(fault.code)
        stream.receiver.stream_lost(Loss(fault.code, str(fault)))

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._receive_window -= length
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overrun")
        self._credit += length
        if self._credit * 2 >= self.limits.connection_window:
            self.send_control(window_update(0, self._credit))
            self._receive_window += self._credit
            self._credit = 0
        stream = self.streams.get(number)
        if stream is None or stream.ended_there:
            self._on_stray(number, stream)
            return
        if flags & Flag.PADDED:
            payload = without_padding(payload, flags)
        ended = bool(flags & Flag.END_STREAM)
        if not ended and not payload:
            self._count_nuisance()
        self._take_credit(stream, length, ended)
        stream.last_progress = self.time
        try:
            stream.receiver.data_received(payload, ended)
        except StreamFault:
            raise
        except Exception:
            _logger.exception("a stream's receiver failed")
            raise StreamFault(ErrorCode.INTERNAL_ERROR, "internal error") from None

    def _take_credit(self, stream: Stream, length: int, ended: bool) -> None:
        """Note that a stream's data has come; give its window back in pieces."""
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overrun")
        stream.credit += length
        if ended:
            stream.ended_there = True
            if stream.ended_here and not stream.unsent_bytes:
                self.forget(stream)
        elif stream.credit * 2 >= self.limits.stream_window:
            self.send_control(window_update(stream.number, stream.credit))
            stream.receive_window += stream.credit
            stream.credit = 0

    def _on_stray(self, number: int, stream: Stream | None) -> None:
        """Judge a frame for a stream that is not open."""
        if number == 0 or self._is_idle(number):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame on idle stream {number}")
        self._count_nuisance()
        if stream is not None:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "data after the end")

    def _is_idle(self, number: int) -> bool:
        """Whether a stream has never been opened, by either side."""
        return number > self.last_stream

    def _on_other(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        if self._block is not None and (
            kind != FrameType.CONTINUATION or number != self._block.stream
        ):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if self._settings_are_due:
            if kind != FrameType.SETTINGS or flags & Flag.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
            self._settings_are_due = False
        match kind:
            case FrameType.HEADERS | FrameType.CONTINUATION if self._deaf:
                self._count_nuisance()
            case FrameType.WINDOW_UPDATE:
                self._on_window_update(number, uint32(payload, FrameType.WINDOW_UPDATE))
            case FrameType.HEADERS:
                self._on_headers(number, flags, payload)
            case FrameType.CONTINUATION:
                self._on_continuation(flags, payload)
            case FrameType.RST_STREAM:
                self._on_reset(number, uint32(payload, FrameType.RST_STREAM))
            case FrameType.SETTINGS:
                self._on_settings(number, flags, payload)
            case FrameType.PING:
                self._on_ping(number, flags, payload)
            case FrameType.GOAWAY:
                self._on_goaway(number, payload)
            case FrameType.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not allowed")
            case FrameType.PRIORITY:
                self._count_nuisance()
                if number == 0:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
                if len(payload) != 5:
                    raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes")
            case _:  # RFC 9113, 5.5: unknown ones are ignored
                self._count_nuisance()

    def _on_headers(self, number: int, flags: int, payload: bytes) -> None:
        if number == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        payload = without_padding(payload, flags)
        if flags & Flag.PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        if flags & Flag.END_HEADERS:
            self._on_block(number, flags, payload)
        else:
            self._block = _OpenBlock(number, flags, payload, self.time)

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if not payload:
            self._count_nuisance()
        block.fragments.append(payload)
        block.size += len(payload)
        if block.size > self.limits.max_header_bytes:
            self._block = None
            limit = self.limits.max_header_bytes
            self._hear_no_more(HeadersTooLarge(f"a header block of more than {limit} bytes"))
        elif flags & Flag.END_HEADERS:
            self._block = None
            self._on_block(block.stream, block.flags, b"".join(block.fragments))

    def _on_block(self, number: int, flags: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block)
        except HeadersTooLarge as fault:
            self._hear_no_more(fault)
            return
        try:
            self.headers_received(number, headers, bool(flags & Flag.END_STREAM))
        except (ConnectionFault, StreamFault):
            raise
        except Exception:
            _logger.exception("a stream's receiver failed")
            raise StreamFault(ErrorCode.INTERNAL_ERROR, "internal error") from None

    def _hear_no_more(self, fault: HeadersTooLarge) -> None:
        """Take no more requests after headers that are too large; those under way go on.

        The block is not decoded, so no later one can be.
        """
        if not self.is_server:
            raise fault
        self._deaf = True
        self.closing = True
        _logger.warning("an HTTP/2 connection is refused further requests: %s", fault)
        self.send_control(goaway(self.last_stream, fault.code, str(fault)))
        if not self.streams:
            self.close()

    def _on_window_update(self, number: int, increment: int) -> None:
        increment &= MAX_WINDOW
        if number == 0:
            if increment == 0 or self.window + increment > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE out of range")
            self.window += increment
            self._serve_waiting()
            return
        stream = self.streams.get(number)
        if stream is None:
            if self._is_idle(number):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return  # the stream ended while the frame was on its way
        if increment == 0 or stream.window + increment > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE out of range")
        stream.window += increment
        if stream.unsent_bytes:
            stream.send_pending()

    def _on_reset(self, number: int, code: int) -> None:
        if number == 0 or (number not in self.streams and self._is_idle(number)):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._count_nuisance()
        stream = self.streams.get(number)
        if stream is not None:
            stream.discard()
            loss = Loss(
                code,
                f"the peer has reset the stream ({_name_of(code)})",
                unprocessed=code == ErrorCode.REFUSED_STREAM,
            )
            stream.receiver.stream_lost(loss)

    def _on_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & Flag.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            return
        self._count_nuisance()
        for key, value in read_settings(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
            elif key == Setting.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
            elif key == Setting.ENABLE_PUSH and value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH = {value}")
            elif key == Setting.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 2**24:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE = {value}")
        self.send_control(frame(FrameType.SETTINGS, Flag.ACK, 0))

    def _resize_windows(self, size: int) -> None:
        if size > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE = {size}")
        change, self.initial_window = size - self.initial_window, size
        for stream in list(self.streams.values()):
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window out of range")
            if stream.unsent_bytes and stream.window > 0:
                stream.send_pending()

    def _on_ping(self, number: int, flags: int, payload: bytes) -> None:
        if number != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if flags & Flag.ACK:
            self._pinged = 0.0
            return
        self._count_nuisance()
        self.send_control(frame(FrameType.PING, Flag.ACK, 0, payload))

    def _on_goaway(self, number: int, payload: bytes) -> None:
        if number != 0 or len(payload) < 8:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a broken GOAWAY")
        last = int.from_bytes(payload[:4], "big") & MAX_STREAM_ID
        code = int.from_bytes(payload[4:8], "big")
        self.closing = True
        message = f"the peer takes no more streams ({_name_of(code)}) {payload[8:264]!r}"
        for stream in [each for each in self.streams.values() if self._is_beyond(each, last)]:
            stream.discard()
            stream.receiver.stream_lost(Loss(code, message, unprocessed=True))
        if not self.streams:
            self.close()

    def _is_beyond(self, stream: Stream, last: int) -> bool:
        """Whether the peer will not look at a stream, `last` being the last one that it will."""
        return not self.is_server and stream.number > last

    # Time.

    def _count_nuisance(self) -> None:
        if self._nuisances.add(self.time):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames without use")

    def _keep_house(self) -> None:
        """Look after what should have come, every few seconds."""
        now = self.loop.time()
        self._housekeeper = self.loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)
        limits = self.limits
        waits_for_first = self._preface_is_due or self._settings_are_due
        if waits_for_first and now - self._began > limits.preface_seconds:
            self.abort("the peer has not begun to speak HTTP/2 in time")
        elif self._block is not None and now - self._block.began > limits.headers_seconds:
            self.abort("a header block has not ended in time")
        elif self._pinged and now - self._pinged > limits.pong_seconds:
            self.abort(f"the peer has not answered a PING in {limits.pong_seconds:g} s")
        else:
            self._end_stalled(now)
            if not self._pinged and now - self.time > limits.ping_seconds:
                self._pinged = now
                self.send_control(frame(FrameType.PING, 0, 0, b"mii-ping"))

    def _end_stalled(self, now: float) -> None:
        """Reset the streams on which the peer should do something and does not."""
        limit = self.limits.request_seconds
        for stream in list(self.streams.values()):
            owes_request = self.is_server and not stream.ended_there
            if (owes_request or stream.unsent_bytes) and now - stream.last_progress > limit:
                stream.reset(ErrorCode.CANCEL)
                what = "sent no part of its request" if owes_request else "read nothing"
                message = f"the client has {what} for {limit:g} s"
                stream.receiver.stream_lost(Loss(ErrorCode.CANCEL, message))


def _name_of(code: int) -> str:
    return ErrorCode(code).name if code in list(ErrorCode) else f"error {code}"
