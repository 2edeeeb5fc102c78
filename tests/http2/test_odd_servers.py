"""Our client before servers that answer oddly, wrongly or not at all: each call ends, rightly."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import hpack
import pytest

from mii.http2.client import Channel
from mii.http2.frames import ErrorCode
from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.limits import Limits
from tests.http2.conftest import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    frame,
    message,
)

OK = {":status": "200", "content-type": "application/grpc"}
GOOD = {"grpc-status": "0"}
Script = Callable[[Peer], Awaitable[None]]


def head(peer: Peer, headers: dict[str, str], stream: int = 1, end: bool = False) -> bytes:
    return frame(HEADERS, END_HEADERS | end, stream, peer.encode(headers))


def whole(peer: Peer, stream: int, body: bytes = b"hi") -> bytes:
    return (
        head(peer, OK, stream)
        + frame(DATA, 0, stream, message(body))
        + head(peer, GOOD, stream, end=True)
    )


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def goaway(last: int, code: int = 0) -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last, code))


@asynccontextmanager
async def channel_to(
    script: Script, settings: bytes = b"", limits: Limits | None = None
) -> AsyncIterator[Channel]:
    """A channel to a server whose every connection follows a script."""
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        peer = Peer(reader, writer)
        try:
            assert await reader.readexactly(len(PREFACE)) == PREFACE
            peer.send(frame(SETTINGS, 0, 0, settings))
            await script(peer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = Channel(f"127.0.0.1:{port}", limits=limits or Limits())
    try:
        yield channel
    finally:
        await channel.close()
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)


def answering(build: Callable[[Peer], bytes], again: bool = True) -> Script:
    """A script: the first request is answered as built, the others rightly."""

    async def script(peer: Peer) -> None:
        await peer.until(DATA, flags=END_STREAM)
        peer.send(build(peer))
        while again:
            asked = await peer.until(DATA, flags=END_STREAM)
            peer.send(whole(peer, asked.stream))

    return script


async def fault_of(channel: Channel, timeout: float | None = 10.0) -> CallFault:
    with pytest.raises(CallFault) as caught:
        await channel.unary("/a.B/C", b"", timeout=timeout)
    return caught.value


S = StatusCode
ENDINGS: dict[str, tuple[Callable[[Peer], bytes], StatusCode]] = {
    "trailers only": (
        lambda p: head(p, {**OK, "grpc-status": "5"}, end=True),
        S.NOT_FOUND,
    ),
    "an error in trailers": (
        lambda p: head(p, OK) + head(p, {"grpc-status": "9"}, end=True),
        S.FAILED_PRECONDITION,
    ),
    "trailers without a status": (
        lambda p: head(p, OK) + head(p, {"a": "b"}, end=True),
        S.UNKNOWN,
    ),
    "a status that is no number": (
        lambda p: head(p, OK) + head(p, {"grpc-status": "\u00b2"}, end=True),
        S.UNKNOWN,
    ),
    "a status of 5,000 digits": (
        lambda p: head(p, OK) + head(p, {"grpc-status": "9" * 5000}, end=True),
        S.UNKNOWN,
    ),
    "no trailers": (
        lambda p: head(p, OK) + frame(DATA, END_STREAM, 1, message(b"hi")),
        S.INTERNAL,
    ),
    "trailers that are malformed": (
        lambda p: head(p, OK) + head(p, {":status": "200", **GOOD}, end=True),
        S.INTERNAL,
    ),
    "trailers that do not end the stream": (lambda p: head(p, OK) + head(p, GOOD), S.INTERNAL),
    "headers without a status": (lambda p: head(p, {"a": "b"}), S.INTERNAL),
    "headers with upper case": (lambda p: head(p, {**OK, "A": "b"}, end=True), S.INTERNAL),
    "data before headers": (lambda p: frame(DATA, 0, 1, message(b"hi")), S.INTERNAL),
    "a compressed message": (
        lambda p: head(p, OK) + frame(DATA, 0, 1, b"\x01\0\0\0\x01x"),
        S.INTERNAL,
    ),
    "a message beyond the limit": (
        lambda p: head(p, OK) + frame(DATA, 0, 1, b"\x00\x7f\xff\xff\xff"),
        S.RESOURCE_EXHAUSTED,
    ),
    "1xx that ends the stream": (lambda p: head(p, {":status": "103"}, end=True), S.UNKNOWN),
    "HTTP 404": (lambda p: head(p, {":status": "404"}), S.UNIMPLEMENTED),
    "HTTP 503": (lambda p: head(p, {":status": "503"}, end=True), S.UNAVAILABLE),
    "HTTP 418": (lambda p: head(p, {":status": "418"}), S.UNKNOWN),
    "REFUSED_STREAM": (lambda p: reset(1, ErrorCode.REFUSED_STREAM), S.UNAVAILABLE),
    "CANCEL": (lambda p: head(p, OK) + reset(1, ErrorCode.CANCEL), S.CANCELLED),
    "ENHANCE_YOUR_CALM": (lambda p: reset(1, ErrorCode.ENHANCE_YOUR_CALM), S.RESOURCE_EXHAUSTED),
    "INTERNAL_ERROR": (lambda p: reset(1, ErrorCode.INTERNAL_ERROR), S.INTERNAL),
    "an error code that nobody knows": (lambda p: reset(1, 0xBEEF), S.INTERNAL),
    "a stream's window beyond 2^31 - 1": (
        lambda p: frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 2**31 - 1)),
        S.INTERNAL,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_how_a_call_ends_while_its_connection_goes_on(ending: str) -> None:
    build, code = ENDINGS[ending]
    async with channel_to(answering(build)) as channel:
        assert (await fault_of(channel)).code == code
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"


BREAKS: dict[str, Callable[[Peer], bytes]] = {
    "PUSH_PROMISE": lambda p: frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2) + p.encode(OK)),
    "ENABLE_PUSH": lambda p: frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 1)),
    "a stream that was never opened": lambda p: head(p, OK, stream=3),
    "an even stream": lambda p: head(p, OK, stream=2),
    "DATA on stream 0": lambda p: frame(DATA, 0, 0, b"x"),
    "a frame beyond 2^14": lambda p: frame(0x99, 0, 0, bytes(16385)),
    "headers that cannot be decoded": lambda p: frame(HEADERS, END_HEADERS, 1, b"\xff" * 9),
    "headers of 100 KB": lambda p: b"".join(
        [frame(HEADERS, 0, 1, b""), *[frame(9, 0, 1, bytes(16384))] * 6]
    ),
    "GOAWAY with an error": lambda p: goaway(0, ErrorCode.INTERNAL_ERROR),
    "GOAWAY with an unknown error": lambda p: goaway(0, 0xBEEF),
}


@pytest.mark.parametrize("what", BREAKS)
async def test_what_breaks_the_connection_is_unavailable_and_the_next_call_gets_another(
    what: str,
) -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        build = BREAKS[what] if connections == 1 else lambda peer: whole(peer, 1)
        await answering(build)(peer)

    async with channel_to(script) as channel:
        assert (await fault_of(channel)).code == S.UNAVAILABLE
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"
    assert connections == 2


async def test_informational_headers_are_passed_over() -> None:
    script = answering(lambda p: head(p, {":status": "103", "link": "x"}) + whole(p, 1))
    async with channel_to(script) as channel:
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"


async def test_a_call_under_way_ends_well_after_goaway_and_the_next_one_goes_elsewhere() -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await answering(lambda p: goaway(1) + whole(p, 1), again=False)(peer)
        await peer.ended()

    async with channel_to(script) as channel:
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"
    assert connections == 2


async def test_no_more_streams_are_opened_than_the_server_allows() -> None:
    open_streams, most = 0, 0

    async def script(peer: Peer) -> None:
        nonlocal open_streams, most
        waiting: list[int] = []
        while True:
            got = await peer.read()
            if got.kind == DATA and got.flags & END_STREAM:
                open_streams += 1
                most = max(most, open_streams)
                waiting.append(got.stream)
                peer.send(frame(PING, 0, 0, bytes(8)))  # answered after what else was sent
            elif got.kind == PING and waiting:
                open_streams -= 1
                peer.send(whole(peer, waiting.pop(0)))

    async with channel_to(script, settings=struct.pack(">HI", 3, 2)) as channel:
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"  # SETTINGS have come
        await asyncio.gather(*(channel.unary("/a.B/C", b"", timeout=10) for _ in range(20)))
    assert most == 2


async def test_a_deadline_holds_while_a_call_waits_for_a_stream() -> None:
    async def script(peer: Peer) -> None:
        await answering(lambda p: whole(p, 1), again=False)(peer)
        await peer.ended()

    async with channel_to(script, struct.pack(">HI", 3, 1)) as channel:
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"
        held = await channel.call("/a.B/C", b"", lambda body: None)
        assert (await fault_of(channel, timeout=0.05)).code == S.DEADLINE_EXCEEDED
        held.cancel()


async def test_a_channel_that_closes_ends_calls_that_wait_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        port = deaf.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # the backlog is full: no answer to SYN
            channel = Channel(f"127.0.0.1:{port}", limits=Limits())
            asking = asyncio.ensure_future(fault_of(channel))
            await asyncio.sleep(0.01)
            await channel.close()
            assert (await asking).code == S.UNAVAILABLE


async def test_an_answer_before_the_request_has_gone_out_ends_the_call() -> None:
    """And the rest of the request is not sent."""

    async def script(peer: Peer) -> None:
        await peer.until(HEADERS)
        peer.send(head(peer, {**OK, "grpc-status": "8"}, end=True))
        assert (await peer.until(RST_STREAM, stream=1)).error == ErrorCode.CANCEL

    async with channel_to(script) as channel:
        with pytest.raises(CallFault) as caught:
            await channel.unary("/a.B/C", bytes(10**6), timeout=10)
        assert caught.value.code == S.RESOURCE_EXHAUSTED


async def test_what_cannot_be_sent_opens_no_stream() -> None:
    async with channel_to(answering(lambda p: whole(p, 1))) as channel:
        for metadata in ((("key", "\u00e9"),), (("K", "v"),), (("a b", "v"),)):
            with pytest.raises(ValueError, match="metadata"):
                await channel.unary("/a.B/C", b"", metadata=metadata)
        assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"


async def test_a_server_that_does_not_answer_pings_is_given_up() -> None:
    async def script(peer: Peer) -> None:
        await peer.ended()

    limits = Limits(ping_seconds=0.02, pong_seconds=0.05, housekeeping_seconds=0.01)
    async with channel_to(script, limits=limits) as channel:
        assert (await fault_of(channel)).code == S.UNAVAILABLE


async def test_a_server_without_a_header_table_understands_us() -> None:
    async def script(peer: Peer) -> None:
        decoder = hpack.Decoder()
        for asked in (1, 3):
            got = await peer.until(HEADERS)
            assert dict(decoder.decode(got.payload))[":path"] == "/a.B/C"
            decoder.max_allowed_table_size = 0  # the client has surely read our SETTINGS
            await peer.until(DATA, flags=END_STREAM)
            peer.send(whole(peer, asked))

    async with channel_to(script, settings=struct.pack(">HI", 1, 0)) as channel:
        for _ in range(2):
            assert await channel.unary("/a.B/C", b"", timeout=10) == b"hi"
