"""A gRPC server: calls that come on HTTP/2 connections, and who answers them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from mii.http2.connection import Connection
from mii.http2.frames import ConnectionFault, ErrorCode, StreamFault
from mii.http2.grpc_wire import (
    CallFault,
    StatusCode,
)
from mii.http2.header_decoder import Header
from mii.http2.headers import check_request, encode_headers
from mii.http2.limits import Limits
from mii.http2.server_call import Handler, ServerCall
from mii.http2.stream import Stream

_PARTING_SECONDS: Final = 0.2  # for clients to close their ends when the server stops
# Streams that we have ended before the client did: it may still send trailers on them.
_MAX_CUT_SHORT: Final = 4096
_NO_GRPC: Final = (
    b"This port speaks gRPC over HTTP/2; for REST use HTTP/1.1 (curl: without --http2).\n"
)


class _ServerConnection(Connection):
    """A client's connection."""

    is_server: ClassVar[bool] = True

    def __init__(self, server: Server) -> None:
        super().__init__(server.limits)
        self._server = server
        self._cut_short: dict[int, None] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._server.parted(self)

    def note_cut_short(self, number: int) -> None:
        self._cut_short[number] = None
        if len(self._cut_short) > _MAX_CUT_SHORT:
            del self._cut_short[next(iter(self._cut_short))]

    def headers_received(self, number: int, headers: list[Header], ended: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            if stream.ended_there:
                raise StreamFault(ErrorCode.STREAM_CLOSED, "headers after the end")
            if not ended:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a second header list")
            stream.ended_there = True
            stream.receiver.headers_received(headers, ended)
            return
        if number in self._cut_short:
            self._count_nuisance()
            return
        if number % 2 == 0 or number <= self.last_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a request on stream {number}")
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
        self._empty = asyncio.Event()  # there is no connection
        self._empty.set()

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
        if grace > 0 and any(connection.streams for connection in self.connections):
            await self._until_empty(grace)
        for call in list(self._calls):
            call.cancel(StatusCode.UNAVAILABLE, "the server is stopping: send the request again")
        await asyncio.sleep(0)  # what was sent goes out
        for connection in list(self.connections):
            connection.close()
        await self._until_empty(_PARTING_SECONDS)
        for connection in list(self.connections):
            connection.abort("the server has stopped")
        await self._until_empty(_PARTING_SECONDS)

    async def _until_empty(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)

    # For connections and calls.

    def joined(self, connection: Connection) -> None:
        """Note that a client has connected."""
        self.connections.add(connection)
        self._empty.clear()
        if self._draining:
            connection.drain()

    def parted(self, connection: Connection) -> None:
        """Note that a client's connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def begin(
        self, connection: Connection, number: int, headers: list[Header], ended: bool
    ) -> None:
        """Begin a call that has come on a connection."""
        plain = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        call = ServerCall(self, plain[":path"], plain)
        stream = Stream(connection, number, call)
        connection.streams[number] = stream
        stream.ended_there = ended
        if plain[":method"] != "POST" or not _is_grpc(plain.get("content-type", "")):
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
        call.held_bytes = 0

    def hold(self, change: int) -> bool:
        """Count bytes of requests that are not whole; return whether there is room for them."""
        self._held_bytes += change
        return change <= 0 or self._held_bytes <= self._max_held_bytes


def _is_grpc(content_type: str) -> bool:
    """Whether a request is gRPC's, with whatever message format, and not grpc-web's."""
    rest = content_type.removeprefix("application/grpc")
    return rest != content_type and rest[:1] in ("", "+", ";")


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
