"""Servers of `mii.http2`, and a peer that speaks raw frames to them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hpack
import pytest
import uvloop

from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.limits import Limits
from mii.http2.server import Server
from mii.http2.server_call import Handler, ServerCall

SECONDS = 10.0  # within which what is waited for must happen

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def message(body: bytes) -> bytes:
    return b"\x00" + len(body).to_bytes(4, "big") + body


@dataclass
class Frame:
    """One frame as the server has sent it."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def error(self) -> int:
        """The error code of RST_STREAM or GOAWAY."""
        at = 4 if self.kind == GOAWAY else 0
        return int.from_bytes(self.payload[at : at + 4], "big")


class Peer:
    """A client that sends what it is told, right or wrong."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    def begin(self, settings: bytes = b"") -> None:
        self.send(PREFACE, frame(SETTINGS, 0, 0, settings))

    async def drain(self) -> None:
        await asyncio.wait_for(self._writer.drain(), SECONDS)

    def encode(self, headers: Mapping[str, str]) -> bytes:
        return self._encoder.encode(list(headers.items()), huffman=False)

    def decode(self, block: bytes) -> dict[str, str]:
        return dict(self._decoder.decode(block))

    def block(self, path: str = "/a.B/Echo", **more: str) -> bytes:
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            "content-type": "application/grpc",
            "te": "trailers",
            **more,
        }
        return self.encode(headers)

    def ask(self, stream: int, path: str = "/a.B/Echo", body: bytes = b"hi", **more: str) -> None:
        data = message(body)
        self.send(frame(HEADERS, END_HEADERS, stream, self.block(path, **more)))
        for at in range(0, len(data), 16384):
            self.send(frame(DATA, 0, stream, data[at : at + 16384]))
        self.send(frame(DATA, END_STREAM, stream))

    async def read(self) -> Frame:
        async with asyncio.timeout(SECONDS):
            header = await self._reader.readexactly(9)
            length = int.from_bytes(header[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", header[3:])
            return Frame(kind, flags, stream, await self._reader.readexactly(length))

    async def until(self, kind: int, stream: int | None = None, flags: int = 0) -> Frame:
        """Return the next frame of a kind, and skip others."""
        while True:
            got = await self.read()
            if got.kind == kind and got.flags & flags == flags and stream in (None, got.stream):
                return got

    async def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """Return a call's message and trailers."""
        data = b""
        while True:
            got = await self.read()
            if got.kind == HEADERS:
                headers = dict(self._decoder.decode(got.payload))
                if got.stream == stream and got.flags & END_STREAM:
                    return data[5:], headers
            elif got.kind == DATA and got.stream == stream:
                data += got.payload
            assert got.kind not in (GOAWAY, RST_STREAM), got

    async def pong(self) -> None:
        """Return when the server has seen all that was sent."""
        self.send(frame(PING, 0, 0, b"are you?"))
        while (await self.until(PING, flags=1)).payload != b"are you?":
            pass

    async def ended(self) -> None:
        """Return when the server has closed the connection."""
        async with asyncio.timeout(SECONDS):
            try:
                while await self._reader.read(2**16):
                    pass
            except ConnectionError:
                pass

    def close(self) -> None:
        self._writer.close()


@dataclass
class Served:
    """A server, its address, and what its handlers have noted."""

    server: Server
    port: int
    noted: list[Any] = field(default_factory=list)
    buffer_bytes: int = 0  # of the system, for what the server sends; 0: as many as it likes
    peers: list[Peer] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def connect(self, settings: bytes | None = b"") -> Peer:
        """Return a peer, which has begun unless `settings` is None."""
        raw = socket.socket()
        if self.buffer_bytes:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.buffer_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        peer = Peer(*await asyncio.open_connection(sock=raw))
        self.peers.append(peer)
        if settings is not None:
            peer.begin(settings)
        return peer

    async def still_serves(self) -> None:
        """Assert that another client is answered."""
        peer = await self.connect()
        peer.ask(1)
        assert (await peer.answer(1))[0] == b"hi"
        peer.close()

    async def until_idle(self) -> None:
        """Return when no call is left."""
        async with asyncio.timeout(SECONDS):
            while self.server.calls_under_way:
                await asyncio.sleep(0.001)


Serve = Callable[..., Awaitable[Served]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of production, and in the long form the standard library's, too."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if config.getoption("--full"):
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers."""
    started: list[Served] = []

    async def start(
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        protocol: Callable[[Server], Callable[[], asyncio.Protocol]] | None = None,
        max_held_bytes: int = 2**29,
        buffer_bytes: int = 0,
        **handlers: Handler,
    ) -> Served:
        noted: list[Any] = []
        table = {f"/a.B/{name}": handler for name, handler in handlers.items()}
        server = Server(
            {**standard_handlers(noted), **table},
            limits=limits or Limits(),
            fault_of=fault_of,
            max_held_bytes=max_held_bytes,
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        await server.listen(listener, tls, protocol and protocol(server))
        started.append(Served(server, listener.getsockname()[1], noted, buffer_bytes))
        return started[-1]

    yield start
    for served in started:
        for peer in served.peers:
            peer.close()
        await served.server.stop(0)


def fault_of(error: Exception) -> CallFault:
    return CallFault(StatusCode.INTERNAL, repr(error))


def standard_handlers(noted: list[Any]) -> Mapping[str, Handler]:
    """Return an echo, a stream, a conversation, and one that waits for its cancellation."""

    async def echo(call: ServerCall) -> None:
        body = await call.receive_only()
        call.send_initial_metadata((("first", call.headers.get("asked", "")),))
        call.trailing_metadata = (("last", "yes"),)
        call.send(body)

    async def count(call: ServerCall) -> None:
        for number in range(int(await call.receive_only())):
            call.send(b"%d" % number)

    async def converse(call: ServerCall) -> None:
        while (body := await call.receive()) is not None:
            call.send(body.upper())

    async def wait(call: ServerCall) -> None:
        await call.receive_only()
        call.send_initial_metadata()
        try:
            await asyncio.Event().wait()
        finally:
            noted.append(call.loss)

    async def refuse(call: ServerCall) -> None:
        raise CallFault(StatusCode.ABORTED, "d\u00e9j\u00e0 vu, 100 %\n", (("why", "because"),))

    async def fail(call: ServerCall) -> None:
        raise ZeroDivisionError

    return {
        "/a.B/Echo": echo,
        "/a.B/Count": count,
        "/a.B/Converse": converse,
        "/a.B/Wait": wait,
        "/a.B/Refuse": refuse,
        "/a.B/Fail": fail,
    }
