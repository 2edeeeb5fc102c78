"""One HTTP/2 connection: what comes on it, and whether it may. What both ends have in common."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import Final

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
    uint32,
    unpack_header,
    window_update,
    without_padding,
)
from mii.http2.header_decoder import Header, HeaderDecoder, HeadersTooLarge
from mii.http2.limits import Bucket, Limits
from mii.http2.sender import Sender
from mii.http2.stream import Loss, Stream

# As numbers: the operators of enums take as long as all else that is done for a small frame.
_DATA: Final = int(FrameType.DATA)
_PADDED: Final = int(Flag.PADDED)
_END_STREAM: Final = int(Flag.END_STREAM)
_END_HEADERS: Final = int(Flag.END_HEADERS)
_ACK: Final = int(Flag.ACK)
_PRIORITY: Final = int(Flag.PRIORITY)
_NO_TABLE: Final = b"\x20"  # HPACK: the dynamic table has no room from here on
_BYTES_PER_TURN: Final = 2**15  # that are read of a connection, before others have their turn
_SMALL_BYTES: Final = 1024  # of DATA that nobody wants: more of it costs its sender more than us

_logger = logging.getLogger(__name__)


class _OpenBlock:
    """A header block whose CONTINUATION frames are still to come."""

    def __init__(self, stream: int, flags: int, fragment: bytes, now: float) -> None:
        self.stream = stream
        self.flags = flags
        self.fragments = [fragment]
        self.size = len(fragment)
        self.began = now


class Connection(Sender):
    """One end of a connection.

    Args:
        limits: what the peer may do.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.peer_max_streams = MAX_STREAM_ID
        self._rest = b""  # of what was read: part of a frame
        self._decoder = HeaderDecoder(limits.max_header_bytes)
        self._block: _OpenBlock | None = None
        self._takes_data = False  # SETTINGS have come, and no header block is open
        self._deaf = False  # header blocks are skipped: see `_hear_no_more`
        self._receive_window = max(DEFAULT_WINDOW, limits.connection_window)
        self._credit = 0  # bytes of it that have come and that the peer does not have back yet
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._housekeeper = self.loop.call_later(self.limits.housekeeping_seconds, self._keep_house)

    def _end(self, message: str) -> None:
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        super()._end(message)

    # Reading.

    def data_received(self, data: bytes) -> None:
        # uvloop hands over 250 KB at a time, and more as long as there is more, before anything
        # else has its turn: what all those frames send would wait for seconds.
        if len(data) > _BYTES_PER_TURN and self._transport is not None:
            self._transport.pause_reading()
            self._read_on(self._transport, data)
        else:
            self._read(data)

    def _read_on(self, transport: asyncio.Transport, data: bytes) -> None:
        self._read(data[:_BYTES_PER_TURN])
        if len(data) > _BYTES_PER_TURN and self._transport is not None:
            self.loop.call_soon(self._read_on, transport, data[_BYTES_PER_TURN:])
        else:
            transport.resume_reading()

    def _read(self, data: bytes) -> None:
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
                if kind == _DATA and self._takes_data:
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
            if self._is_idle(number):  # which must not be reset
                raise ConnectionFault(fault.code, str(fault))
            self.note_cut_short(number)
            self.send_control(rst_stream(number, fault.code))
            return
        stream.reset(fault.code)
        stream.receiver.stream_lost(Loss(fault.code, str(fault)))

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._credit += length
        if self._credit * 2 >= self.limits.connection_window:
            self._return_credit()
        stream = self.streams.get(number)
        if stream is None or stream.ended_there:
            self._on_stray(number, stream, length)
            return
        if flags & _PADDED:
            payload = without_padding(payload, flags)
        ended = flags & _END_STREAM != 0
        if not ended and not payload:
            self._count_nuisance()
        stream.credit += length
        if ended or stream.credit * 2 >= self.limits.stream_window:
            self._look_at_window(stream, ended)
        stream.last_progress = self.time
        try:
            stream.receiver.data_received(payload, ended)
        except StreamFault:
            raise
        except Exception:
            _logger.exception("a stream's receiver failed")
            raise StreamFault(ErrorCode.INTERNAL_ERROR, "internal error") from None
        if ended and stream.over:
            self.forget(stream)

    def _return_credit(self) -> None:
        if self._credit > self._receive_window:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overrun")
        self.send_control(window_update(0, self._credit))
        self._credit = 0

    def _look_at_window(self, stream: Stream, ended: bool) -> None:
        """Give a stream's window back, if there is something to come for it."""
        if stream.credit > stream.receive_window:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overrun")
        if ended:
            stream.ended_there = True
        elif not stream.holds_credit:
            stream.return_credit()

    def _on_stray(self, number: int, stream: Stream | None, length: int) -> None:
        """Judge DATA for a stream that takes none."""
        if number == 0 or self._is_idle(number):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA on idle stream {number}")
        if length < _SMALL_BYTES:
            self._count_nuisance()
        if stream is not None:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "data after the end")

    def _is_idle(self, number: int) -> bool:
        """Whether a stream has never been opened, by either side."""
        return (number > self.last_stream and not self._deaf) or number % 2 == 0

    def _on_other(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        if self._block is not None and (
            kind != FrameType.CONTINUATION or number != self._block.stream
        ):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if self._settings_are_due:
            if kind != FrameType.SETTINGS or flags & _ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
            self._settings_are_due = False
            self._takes_data = True
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
        if flags & _PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._on_block(number, flags, payload)
        else:
            self._block = _OpenBlock(number, flags, payload, self.time)
            self._takes_data = False

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if not payload:
            self._count_nuisance()
        block.fragments.append(payload)
        block.size += len(payload)
        if block.size > self.limits.max_header_bytes:
            self._end_block()
            limit = self.limits.max_header_bytes
            self._hear_no_more(HeadersTooLarge(f"a header block of more than {limit} bytes"))
        elif flags & _END_HEADERS:
            self._end_block()
            self._on_block(block.stream, block.flags, b"".join(block.fragments))

    def _end_block(self) -> None:
        self._block = None
        self._takes_data = True

    def _on_block(self, number: int, flags: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block)
        except HeadersTooLarge as fault:
            self._hear_no_more(fault)
            return
        try:
            self.headers_received(number, headers, bool(flags & _END_STREAM))
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
            if increment == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            if self.window + increment > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
            self.window += increment
            self._serve_waiting()
            return
        stream = self.streams.get(number)
        if stream is None:
            if self._is_idle(number):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return  # the stream ended while the frame was on its way
        if increment == 0:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
        if stream.window + increment > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
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
        if flags & _ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            return
        self._count_nuisance()
        for key, value in read_settings(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
            elif key == Setting.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
            elif key == Setting.HEADER_TABLE_SIZE:
                # We use no table, but RFC 7541, 4.2, has us say so when it must shrink.
                self.table_update = _NO_TABLE
            elif key == Setting.ENABLE_PUSH and value > self.is_server:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH = {value}")
            elif key == Setting.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 2**24:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE = {value}")
        self.send_control(frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._serve_waiting()  # not before: for the peer the larger windows begin with the ACK

    def _resize_windows(self, size: int) -> None:
        if size > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE = {size}")
        change, self.initial_window = size - self.initial_window, size
        for stream in list(self.streams.values()):
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window out of range")
            if stream.unsent_bytes and stream.window > 0:
                self.wait_for_room(stream)

    def _on_ping(self, number: int, flags: int, payload: bytes) -> None:
        if number != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if flags & _ACK:
            self._pinged = 0.0
            return
        self._count_nuisance()
        self.send_control(frame(FrameType.PING, Flag.ACK, 0, payload))

    def _on_goaway(self, number: int, payload: bytes) -> None:
        if number != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY must have 8 bytes")
        last = int.from_bytes(payload[:4], "big") & MAX_STREAM_ID
        code = int.from_bytes(payload[4:8], "big")
        self.closing = True
        message = f"the peer takes no more streams ({_name_of(code)}) {payload[8:264]!r}"
        for stream in [each for each in self.streams.values() if self._is_beyond(each, last)]:
            stream.discard()
            stream.receiver.stream_lost(Loss(code, message, unprocessed=True))
        if not self.streams:
            self._part(message)

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
        limits = self.limits
        self._housekeeper = self.loop.call_later(limits.housekeeping_seconds, self._keep_house)
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
            waits = self.is_server and not stream.ended_there and not stream.holds_credit
            if (waits or stream.blocked) and now - stream.last_progress > limit:
                what = "read nothing" if stream.blocked else "sent no part of its request"
                stream.reset(ErrorCode.CANCEL)
                message = f"the peer has {what} for {limit:g} s"
                stream.receiver.stream_lost(Loss(ErrorCode.CANCEL, message))


def _name_of(code: int) -> str:
    return ErrorCode(code).name if code in list(ErrorCode) else f"error {code}"
