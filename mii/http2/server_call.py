"""One call of a gRPC client, as the handler that answers it sees it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from mii.http2.frames import ErrorCode, StreamFault
from mii.http2.grpc_wire import (
    CONTENT_TYPE,
    CallFault,
    MessageReader,
    StatusCode,
    encode_message_text,
    frame_message,
    metadata_block,
    parse_timeout,
)
from mii.http2.header_decoder import Header
from mii.http2.headers import check_trailers, encode_headers
from mii.http2.stream import Loss, Stream

if TYPE_CHECKING:
    from mii.http2.server import Server

Metadata = tuple[tuple[str, str], ...]
Handler = Callable[["ServerCall"], Awaitable[None]]

_RESPONSE: Final = ((b":status", b"200"), (b"content-type", CONTENT_TYPE))
_RESPONSE_BLOCK: Final = encode_headers(_RESPONSE)
_OK_BLOCK: Final = encode_headers(((b"grpc-status", b"0"),))
_MESSAGE_OVERHEAD: Final = 64  # bytes that a message takes in memory besides its own

_logger = logging.getLogger(__name__)


class ServerCall:
    """One call as its handler sees it. Belongs to the event loop.

    A handler is a coroutine; it is cancelled when the client has gone or the deadline has passed.
    What it raises is told by the server's `fault_of`.

    Args:
        server: whose handlers answer.
        path: "/package.Service/Method".
        headers: of the request, pseudo-headers included.
    """

    __slots__ = (
        "_announced",
        "_deadline",
        "_headers_sent",
        "_messages",
        "_news",
        "_on_writable",
        "_queued_bytes",
        "_reader",
        "_room",
        "_server",
        "_stream",
        "_task",
        "_timer",
        "ended",
        "headers",
        "held_bytes",
        "identity",
        "loss",
        "path",
        "trailing_metadata",
    )

    def __init__(self, server: Server, path: str, headers: Mapping[str, str]) -> None:
        self.path = path
        self.headers = headers
        self.loss: Loss | None = None  # if the client, or the way to it, is gone
        self.ended = False
        self.identity: object = None  # for `authorise` to say who calls
        self.held_bytes = 0  # of messages that have not come in whole, or wait for the handler
        self.trailing_metadata: Metadata = ()
        self._server = server
        self._stream: Stream
        self._reader: MessageReader | None = None
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0  # what they take
        self._announced: int | None = None  # bytes of the body still to come, by content-length
        self._room: asyncio.Future[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._headers_sent = False
        self._on_writable: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None

    # For the handler.

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None: there is none."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def receive(self) -> bytes | None:
        """Return the next message of the request; None after the last one."""
        while not self._messages:
            if self._stream.ended_there:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        message = self._messages.popleft()
        if not self.ended:
            self._queued_bytes -= len(message) + _MESSAGE_OVERHEAD
            self._hold()
        return message

    async def receive_only(self) -> bytes:
        """Return the request's only message.

        Raises:
            CallFault: if it has none, or more.
        """
        body = await self.receive()
        if body is None or await self.receive() is not None:
            raise CallFault(StatusCode.INTERNAL, f"{self.path} takes exactly one message")
        return body

    def send_initial_metadata(self, metadata: Metadata = ()) -> None:
        """Send the response's headers; they go with the first message otherwise."""
        if self._headers_sent:
            return
        block = _RESPONSE_BLOCK
        if metadata:
            block += encode_headers(metadata_block(metadata))
        self._headers_sent = True
        self._stream.send_headers(block)

    def send(self, body: bytes) -> None:
        """Send a message, or keep it until the client has room: see `writable`."""
        if not self._headers_sent:
            self.send_initial_metadata()
        self._stream.send(frame_message(body))

    @property
    def writable(self) -> bool:
        """Whether all messages have gone out."""
        return self._stream.writable

    async def drained(self) -> None:
        """Return when all messages have gone out, in the event loop's next turn at the earliest."""
        await asyncio.sleep(0)
        while not self._stream.writable:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def on_writable(self, function: Callable[[], None]) -> None:
        """Have a function called each time that all messages have gone out after a jam."""
        self._on_writable = function

    # For the server.

    def start(self, stream: Stream, handler: Handler) -> None:
        """Begin to answer."""
        self._stream = stream
        loop = asyncio.get_running_loop()
        try:
            compression = self.headers.get("grpc-encoding", "identity")
            self._reader = MessageReader(self._server.limits.max_message_bytes, compression)
            self._announced = _content_length(self.headers)
            timeout = self.headers.get("grpc-timeout")
            if timeout is not None:
                seconds = parse_timeout(timeout)
                self._deadline = loop.time() + seconds
                self._timer = loop.call_at(self._deadline, self._expire)
        except CallFault as fault:
            self.finish(fault.code, fault.message, fault.metadata)
            return
        self._task = loop.create_task(self._run(handler))

    def finish(self, code: int, message: str = "", metadata: Metadata = ()) -> None:
        """End the call with a status."""
        if self.ended:
            return
        self._leave()
        metadata = (*self.trailing_metadata, *metadata)
        if code == 0 and not metadata and self._headers_sent:
            self._stream.end(_OK_BLOCK)
            return
        try:
            more = metadata_block(metadata)
        except ValueError as error:
            _logger.error("the trailing metadata of %s cannot be sent: %s", self.path, error)
            code, message, more = StatusCode.INTERNAL, "internal error", []
        headers: list[Header] = [] if self._headers_sent else list(_RESPONSE)
        headers.append((b"grpc-status", b"%d" % code))
        if message:
            headers.append((b"grpc-message", encode_message_text(message)))
        self._stream.end(encode_headers(headers + more))

    def cancel(self, code: int, message: str) -> None:
        """End the call with a status and its handler with a cancellation."""
        task = self._task
        self.finish(code, message)
        if task is not None:
            task.cancel()

    async def _run(self, handler: Handler) -> None:
        try:
            await handler(self)
        except asyncio.CancelledError:
            self.finish(StatusCode.CANCELLED, "the call was cancelled")
            raise
        except CallFault as fault:
            self.finish(fault.code, fault.message, fault.metadata)
        except Exception as error:
            told = self._server.fault_of(error)
            self.finish(told.code, told.message, told.metadata)
        else:
            self.finish(StatusCode.OK)

    def _expire(self) -> None:
        self.cancel(StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")

    def _leave(self) -> None:
        self.ended = True
        self._server.left(self)
        self._on_writable = None
        if self._timer is not None:
            self._timer.cancel()

    # As the stream's receiver.

    def headers_received(self, headers: list[Header], ended: bool) -> None:
        check_trailers(headers)  # of which gRPC has none
        self.data_received(b"", ended)

    def data_received(self, data: bytes, ended: bool) -> None:
        if self.ended or self._reader is None:
            return
        if self._announced is not None:
            self._announced -= len(data)
            if self._announced < 0 or (ended and self._announced > 0):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "content-length is not the body's")
        try:
            messages = self._reader.feed(data)
            if ended and self._reader.held_bytes:
                raise CallFault(StatusCode.INTERNAL, "the request ends within a message")
        except CallFault as fault:
            self.cancel(fault.code, fault.message)
            return
        if messages:
            self._messages += messages
            self._queued_bytes += sum(map(len, messages)) + _MESSAGE_OVERHEAD * len(messages)
        if not self._hold():
            self.cancel(
                StatusCode.RESOURCE_EXHAUSTED, "the server holds too many bytes of requests"
            )
        if self._news is not None and not self._news.done() and (self._messages or ended):
            self._news.set_result(None)

    def _hold(self) -> bool:
        """Count what is held of the request; return whether the server has room for it."""
        assert self._reader is not None
        held = self._reader.held_bytes + self._queued_bytes
        stream = self._stream
        if stream.holds_credit is not bool(self._messages) and not stream.ended_there:
            stream.hold_credit(bool(self._messages))
        change, self.held_bytes = held - self.held_bytes, held
        return self._server.hold(change)

    def stream_lost(self, loss: Loss) -> None:
        self.loss = loss
        if not self.ended:
            self._leave()
            if self._task is not None:
                self._task.cancel()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self._on_writable is not None:
            try:
                self._on_writable()
            except Exception as error:
                told = self._server.fault_of(error)
                self.cancel(told.code, told.message)

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Runs the handler."""
        return self._task


def _content_length(headers: Mapping[str, str]) -> int | None:
    """Return how long a body is said to be.

    Raises:
        CallFault: if that is no number.
    """
    value = headers.get("content-length")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise CallFault(StatusCode.INTERNAL, f"content-length {value[:32]!r} is malformed")
    return int(value)
