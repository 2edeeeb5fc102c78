"""A gRPC server: calls that come on HTTP/2 connections, and who answers them."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar, Final

from mii.http2.connection import Connection
from mii.http2.frames import ConnectionFault, ErrorCode, StreamFault
from mii.http2.grpc_wire import (
    CONTENT_TYPE,
    CallFault,
    MessageReader,
    StatusCode,
    encode_message_text,
    metadata_block,
    parse_timeout,
)
from mii.http2.headers import Header, check_request, encode_headers
from mii.http2.limits import Limits
from mii.http2.stream import Loss, Stream

Metadata = tuple[tuple[str, str], ...]
Handler = Callable[["ServerCall"], Awaitable[None]]

_RESPONSE: Final = ((b":status", b"200"), (b"content-type", CONTENT_TYPE))
_RESPONSE_BLOCK: Final = encode_headers(_RESPONSE)
_OK_BLOCK: Final = encode_headers(((b"grpc-status", b"0"),))
_NO_GRPC: Final = (
    b"This port speaks gRPC over HTTP/2; for REST use HTTP/1.1 (curl: without --http2).\n"
)

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
        "_deadline",
        "_headers_sent",
        "_messages",
        "_news",
        "_on_writable",
        "_reader",
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
        self.held_bytes = 0  # of a message that is not whole yet
        self.trailing_metadata: Metadata = ()
        self._server = server
        self._stream: Stream
        self._reader: MessageReader | None = None
        self._messages: list[bytes] = []
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
        return self._messages.pop(0)

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
        self._headers_sent = True
        block = _RESPONSE_BLOCK
        if metadata:
            block += encode_headers(metadata_block(metadata))
        self._stream.send_headers(block)

    def send(self, body: bytes) -> None:
        """Send a message, or keep it until the client has room: see `writable`."""
        if not self._headers_sent:
            self.send_initial_metadata()
        self._stream.send(b"\x00" + len(body).to_bytes(4, "big") + body)

    @property
    def writable(self) -> bool:
        """Whether a message would go out at once."""
        return self._stream.writable

    @property
    def unsent_bytes(self) -> int:
        """Of messages that the client has had no room for."""
        return self._stream.unsent_bytes

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
            timeout = self.headers.get("grpc-timeout")
            if timeout is not None:
                seconds = parse_timeout(timeout)
                self._deadline = loop.time() + seconds
                self._timer = loop.call_at(self._deadline, self._expire)
        except CallFault as fault:
            self.finish(fault.code, fault.message)
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
        headers: list[Header] = [] if self._headers_sent else list(_RESPONSE)
        headers.append((b"grpc-status", b"%d" % code))
        if message:
            headers.append((b"grpc-message", encode_message_text(message)))
        self._stream.end(encode_headers(headers + metadata_block(metadata)))

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
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a gRPC request has no trailers")

    def data_received(self, data: bytes, ended: bool) -> None:
        if self.ended or self._reader is None:
            return
        try:
            self._messages += self._reader.feed(data)
        except CallFault as fault:
            self.cancel(fault.code, fault.message)
            return
        change, self.held_bytes = (
            self._reader.held_bytes - self.held_bytes,
            self._reader.held_bytes,
        )
        if not self._server.hold(change):
            self.cancel(
                StatusCode.RESOURCE_EXHAUSTED, "the server holds too many bytes of requests"
            )
        if self._news is not None and not self._news.done() and (self._messages or ended):
            self._news.set_result(None)

    def stream_lost(self, loss: Loss) -> None:
        self.loss = loss
        if not self.ended:
            self._leave()
            if self._task is not None:
                self._task.cancel()

    def resume_writing(self) -> None:
        if self._on_writable is not None:
            self._on_writable()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Runs the handler."""
        return self._task


class _ServerConnection(Connection):
    """A client's connection."""

    is_server: ClassVar[bool] = True

    def __init__(self, server: Server) -> None:
        super().__init__(server.limits)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)

    def closed(self, message: str) -> None:
        self._server.connections.discard(self)

    def headers_received(self, number: int, headers: list[Header], ended: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            if not ended or stream.ended_there:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a second header list")
            stream.ended_there = True
            stream.receiver.headers_received(headers, ended)
            return
        if number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a request on stream {number}")
        if number <= self.last_stream:
            self._count_nuisance()  # trailers of a request that we have ended, most likely
            return
        self.last_stream = number
        check_request(headers)
        if len(self.streams) >= self.limits.max_streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM, "too many streams")
        self._server.begin(self, number, headers, ended)


class Server:
    """Answers calls.

    Args:
        handlers: by path ("/package.Service/Method").
        limits: of each connection.
        authorise: raises what refuses a call, given its path and headers.
        fault_of: the status that tells of what a handler or `authorise` has raised.
        max_held_bytes: of requests that have not come in whole, all together.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        limits: Limits,
        authorise: Callable[[ServerCall], None] = lambda call: None,
        fault_of: Callable[[Exception], CallFault],
        max_held_bytes: int = 2**29,
    ) -> None:
        self.limits = limits
        self.fault_of = fault_of
        self.connections: set[Connection] = set()
        self._handlers = dict(handlers)
        self._authorise = authorise
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._calls: dict[ServerCall, None] = {}
        self._listeners: list[asyncio.Server] = []
        self._draining = False

    @property
    def calls_under_way(self) -> int:
        """How many there are."""
        return len(self._calls)

    @property
    def held_bytes(self) -> int:
        """Of requests that have not come in whole."""
        return self._held_bytes

    def protocol(self) -> Connection:
        """Return the protocol for a connection that a client has opened."""
        return _ServerConnection(self)

    async def listen(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        protocol: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        """Accept connections on a listening socket.

        Args:
            listener: the socket, which belongs to the server from now on.
            tls: speak TLS.
            protocol: begins connections, instead of `Server.protocol`.
        """
        loop = asyncio.get_running_loop()
        made = await loop.create_server(
            protocol or self.protocol, sock=listener, ssl=tls, backlog=4096
        )
        self._listeners.append(made)

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those under way `grace` seconds to end by themselves."""
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.drain()
        running = [call.task for call in self._calls if call.task is not None]
        if running and grace > 0:
            await asyncio.wait(running, timeout=grace)
        for call in list(self._calls):
            call.cancel(StatusCode.UNAVAILABLE, "the server is stopping: send the request again")
        await asyncio.sleep(0)  # what was sent goes out
        for connection in list(self.connections):
            connection.close()

    # For connections and calls.

    def begin(
        self, connection: Connection, number: int, headers: list[Header], ended: bool
    ) -> None:
        """Begin a call that has come on a connection."""
        plain = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        call = ServerCall(self, plain[":path"], plain)
        stream = Stream(connection, number, call)
        connection.streams[number] = stream
        stream.ended_there = ended
        content_type = plain.get("content-type", "")
        if plain[":method"] != "POST" or not content_type.startswith("application/grpc"):
            _refuse(stream)
            return
        self._calls[call] = None
        handler = self._handlers.get(call.path, _no_method)
        try:
            if handler is not _no_method:
                self._authorise(call)
        except Exception as error:
            handler = _refusal(self.fault_of(error))
        call.start(stream, handler)

    def left(self, call: ServerCall) -> None:
        """Note that a call has ended."""
        self._calls.pop(call, None)
        self._held_bytes -= call.held_bytes

    def hold(self, change: int) -> bool:
        """Count bytes of requests that are not whole; return whether there is room for them."""
        self._held_bytes += change
        return change <= 0 or self._held_bytes <= self._max_held_bytes


def _refuse(stream: Stream) -> None:
    """Answer what is no gRPC, as gRPC's specification has it."""
    headers = ((b":status", b"415"), (b"content-type", b"text/plain; charset=utf-8"))
    stream.send_headers(encode_headers(headers))
    stream.send(_NO_GRPC)
    stream.end()


async def _no_method(call: ServerCall) -> None:
    raise CallFault(StatusCode.UNIMPLEMENTED, f"there is no method {call.path[:256]!r} here")


def _refusal(fault: CallFault) -> Handler:
    async def refuse(call: ServerCall) -> None:
        raise fault

    return refuse
