"""What RFC 9113 says that a server must not take, by section, and how it is answered."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest

from mii.http2.frames import ErrorCode
from mii.http2.limits import Limits
from mii.http2.server_call import ServerCall
from tests.http2.conftest import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    Serve,
    frame,
    message,
)

E = ErrorCode


def setting(key: int, value: int) -> bytes:
    return struct.pack(">HI", key, value)


def increment(value: int) -> bytes:
    return struct.pack(">I", value)


def opened(peer: Peer) -> bytes:
    """HEADERS of a request on stream 1 whose body is still to come."""
    return frame(HEADERS, END_HEADERS, 1, peer.block())


CONNECTION_ERRORS: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "4.2 a frame beyond SETTINGS_MAX_FRAME_SIZE": (
        lambda peer: frame(DATA, 0, 1, bytes(16385)),
        E.FRAME_SIZE_ERROR,
    ),
    "4.3 a block that cannot be decoded": (
        lambda peer: frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        E.COMPRESSION_ERROR,
    ),
    "4.3 another frame within a header block": (
        lambda peer: frame(HEADERS, 0, 1, peer.block()) + frame(PING, 0, 0, bytes(8)),
        E.PROTOCOL_ERROR,
    ),
    "4.3 a header table beyond SETTINGS_HEADER_TABLE_SIZE": (
        lambda peer: frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\xff\x03" + peer.block()),
        E.COMPRESSION_ERROR,
    ),
    "4.3 a header table resized within a block": (
        lambda peer: frame(HEADERS, END_HEADERS, 1, peer.block() + b"\x20"),
        E.COMPRESSION_ERROR,
    ),
    "5.5 an unknown frame within a header block": (
        lambda peer: frame(HEADERS, 0, 1, peer.block()) + frame(0x77, 0, 1),
        E.PROTOCOL_ERROR,
    ),
    "5.1 DATA on an idle stream": (lambda peer: frame(DATA, 0, 1, b"x"), E.PROTOCOL_ERROR),
    "5.1 RST_STREAM on an idle stream": (
        lambda peer: frame(RST_STREAM, 0, 1, bytes(4)),
        E.PROTOCOL_ERROR,
    ),
    "5.1 WINDOW_UPDATE on an idle stream": (
        lambda peer: frame(WINDOW_UPDATE, 0, 1, increment(1)),
        E.PROTOCOL_ERROR,
    ),
    "5.1.1 an even stream": (
        lambda peer: frame(HEADERS, END_HEADERS, 2, peer.block()),
        E.PROTOCOL_ERROR,
    ),
    "5.1.1 a stream below the last one": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 5, peer.block())
            + frame(HEADERS, END_HEADERS, 3, peer.block())
        ),
        E.PROTOCOL_ERROR,
    ),
    "5.1 HEADERS on a stream that the client has reset": (
        lambda peer: (
            opened(peer)
            + frame(RST_STREAM, 0, 1, bytes(4))
            + frame(HEADERS, END_HEADERS, 1, peer.block())
        ),
        E.PROTOCOL_ERROR,
    ),
    "5.1 RST_STREAM on an even stream": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 5, peer.block()) + frame(RST_STREAM, 0, 2, bytes(4))
        ),
        E.PROTOCOL_ERROR,
    ),
    "5.1 PRIORITY of a wrong length on an idle stream": (
        lambda peer: frame(PRIORITY, 0, 1, bytes(4)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.1 DATA on stream 0": (lambda peer: frame(DATA, 0, 0, b"x"), E.PROTOCOL_ERROR),
    "6.1 padding longer than DATA": (
        lambda peer: opened(peer) + frame(DATA, PADDED, 1, b"\x05abcd"),
        E.PROTOCOL_ERROR,
    ),
    "6.2 HEADERS on stream 0": (
        lambda peer: frame(HEADERS, END_HEADERS, 0, peer.block()),
        E.PROTOCOL_ERROR,
    ),
    "6.2 padding longer than HEADERS": (
        lambda peer: frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + peer.block()),
        E.PROTOCOL_ERROR,
    ),
    "6.2 HEADERS too short for their priority": (
        lambda peer: frame(HEADERS, END_HEADERS | 0x20, 1, bytes(4)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.3 PRIORITY on stream 0": (lambda peer: frame(PRIORITY, 0, 0, bytes(5)), E.PROTOCOL_ERROR),
    "6.4 RST_STREAM of a wrong length": (
        lambda peer: opened(peer) + frame(RST_STREAM, 0, 1, bytes(3)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.4 RST_STREAM on stream 0": (
        lambda peer: frame(RST_STREAM, 0, 0, bytes(4)),
        E.PROTOCOL_ERROR,
    ),
    "6.5 SETTINGS on a stream": (lambda peer: frame(SETTINGS, 0, 1), E.PROTOCOL_ERROR),
    "6.5 SETTINGS of a wrong length": (
        lambda peer: frame(SETTINGS, 0, 0, bytes(5)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.5 SETTINGS ACK with a payload": (
        lambda peer: frame(SETTINGS, 1, 0, bytes(6)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.5.2 ENABLE_PUSH of 2": (
        lambda peer: frame(SETTINGS, 0, 0, setting(2, 2)),
        E.PROTOCOL_ERROR,
    ),
    "6.5.2 INITIAL_WINDOW_SIZE beyond 2^31 - 1": (
        lambda peer: frame(SETTINGS, 0, 0, setting(4, 2**31)),
        E.FLOW_CONTROL_ERROR,
    ),
    "6.5.2 INITIAL_WINDOW_SIZE that makes a window too large": (
        lambda peer: (
            opened(peer)
            + frame(WINDOW_UPDATE, 0, 1, increment(2**30))
            + frame(SETTINGS, 0, 0, setting(4, 2**31 - 1))
        ),
        E.FLOW_CONTROL_ERROR,
    ),
    "6.5.2 MAX_FRAME_SIZE beyond 2^24 - 1": (
        lambda peer: frame(SETTINGS, 0, 0, setting(5, 2**24)),
        E.PROTOCOL_ERROR,
    ),
    "6.5.2 MAX_FRAME_SIZE below 2^14": (
        lambda peer: frame(SETTINGS, 0, 0, setting(5, 100)),
        E.PROTOCOL_ERROR,
    ),
    "6.6 PUSH_PROMISE of a client": (
        lambda peer: opened(peer) + frame(PUSH, END_HEADERS, 1, bytes(4)),
        E.PROTOCOL_ERROR,
    ),
    "6.7 PING on a stream": (lambda peer: frame(PING, 0, 1, bytes(8)), E.PROTOCOL_ERROR),
    "6.7 PING of a wrong length": (lambda peer: frame(PING, 0, 0, bytes(7)), E.FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (lambda peer: frame(GOAWAY, 0, 1, bytes(8)), E.PROTOCOL_ERROR),
    "6.8 GOAWAY of a wrong length": (
        lambda peer: frame(GOAWAY, 0, 0, bytes(7)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.9 WINDOW_UPDATE of 0 on the connection": (
        lambda peer: frame(WINDOW_UPDATE, 0, 0, increment(0)),
        E.PROTOCOL_ERROR,
    ),
    "6.9 WINDOW_UPDATE of a wrong length": (
        lambda peer: frame(WINDOW_UPDATE, 0, 0, bytes(3)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.9.1 the connection's window beyond 2^31 - 1": (
        lambda peer: frame(WINDOW_UPDATE, 0, 0, increment(2**31 - 1)),
        E.FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION without HEADERS": (
        lambda peer: frame(CONTINUATION, END_HEADERS, 1, b""),
        E.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION of another stream": (
        lambda peer: frame(HEADERS, 0, 1, peer.block()) + frame(CONTINUATION, END_HEADERS, 3, b""),
        E.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("case", CONNECTION_ERRORS)
async def test_a_fault_that_ends_the_connection(serve: Serve, case: str) -> None:
    build, code = CONNECTION_ERRORS[case]
    served = await serve()
    peer = await served.connect()
    peer.send(build(peer))
    assert (await peer.until(GOAWAY)).error == code
    await peer.ended()
    await served.until_idle()
    await served.still_serves()


def request_with(**headers: str) -> Callable[[Peer], bytes]:
    return lambda peer: frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.block(**headers))


STREAM_ERRORS: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "5.1 DATA after the end": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Wait"))
            + frame(DATA, END_STREAM, 1, message(b""))
            + frame(DATA, 0, 1, b"x")
        ),
        E.STREAM_CLOSED,
    ),
    "5.1 HEADERS after the end": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Wait"))
            + frame(DATA, END_STREAM, 1, message(b""))
            + frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.encode({"a": "b"}))
        ),
        E.STREAM_CLOSED,
    ),
    "8.1 a pseudo-header in trailers": (
        lambda peer: (
            opened(peer)
            + frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.encode({":path": "/a.B/Echo"}))
        ),
        E.PROTOCOL_ERROR,
    ),
    "8.1.1 a body longer than its content-length": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 1, peer.block(**{"content-length": "6"}))
            + frame(DATA, 0, 1, message(b"hi"))
        ),
        E.PROTOCOL_ERROR,
    ),
    "8.1.1 a body shorter than its content-length": (
        lambda peer: (
            frame(HEADERS, END_HEADERS, 1, peer.block(**{"content-length": "8"}))
            + frame(DATA, END_STREAM, 1, message(b"hi"))
        ),
        E.PROTOCOL_ERROR,
    ),
    "8.2.1 NUL in a value": (request_with(a="1\0"), E.PROTOCOL_ERROR),
    "8.3 a pseudo-header twice": (
        lambda peer: frame(
            HEADERS, END_HEADERS, 1, peer.block() + peer.encode({":path": "/a.B/Echo"})
        ),
        E.PROTOCOL_ERROR,
    ),
    "8.3 a pseudo-header after others": (request_with(**{":authority": "a"}), E.PROTOCOL_ERROR),
    "8.3.1 an empty path": (request_with(**{":path": ""}), E.PROTOCOL_ERROR),
    "8.5 CONNECT": (
        lambda peer: frame(
            HEADERS, END_HEADERS, 1, peer.encode({":method": "CONNECT", ":authority": "a:1"})
        ),
        E.PROTOCOL_ERROR,
    ),
    "6.3 PRIORITY of a wrong length": (
        lambda peer: opened(peer) + frame(PRIORITY, 0, 1, bytes(4)),
        E.FRAME_SIZE_ERROR,
    ),
    "6.9 WINDOW_UPDATE of 0 on a stream": (
        lambda peer: opened(peer) + frame(WINDOW_UPDATE, 0, 1, increment(0)),
        E.PROTOCOL_ERROR,
    ),
    "6.9.1 a stream's window beyond 2^31 - 1": (
        lambda peer: opened(peer) + frame(WINDOW_UPDATE, 0, 1, increment(2**31 - 1)),
        E.FLOW_CONTROL_ERROR,
    ),
    "8.1 a second header list that does not end": (
        lambda peer: opened(peer) + frame(HEADERS, END_HEADERS, 1, peer.block()),
        E.PROTOCOL_ERROR,
    ),
    "8.2.1 upper case in a name": (request_with(**{"X-Upper": "1"}), E.PROTOCOL_ERROR),
    "8.2.1 a space in a name": (request_with(**{"a b": "1"}), E.PROTOCOL_ERROR),
    "8.2.1 a newline in a value": (request_with(a="1\r\nb: 2"), E.PROTOCOL_ERROR),
    "8.2.2 a header of the connection": (request_with(connection="close"), E.PROTOCOL_ERROR),
    "8.2.2 te other than trailers": (request_with(te="gzip"), E.PROTOCOL_ERROR),
    "8.3 an unknown pseudo-header": (request_with(**{":status": "200"}), E.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("case", STREAM_ERRORS)
async def test_a_fault_that_ends_one_stream(serve: Serve, case: str) -> None:
    build, code = STREAM_ERRORS[case]
    served = await serve()
    peer = await served.connect()
    peer.send(build(peer))
    assert (await peer.until(RST_STREAM, stream=1)).error == code
    peer.ask(3)
    assert (await peer.answer(3))[0] == b"hi"
    await served.until_idle()


@pytest.mark.parametrize("missing", [":method", ":scheme", ":path"])
async def test_a_request_without_a_pseudo_header_is_malformed(serve: Serve, missing: str) -> None:
    served = await serve()
    peer = await served.connect()
    pseudo = {":method": "POST", ":scheme": "http", ":path": "/a.B/Echo"}
    del pseudo[missing]
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.encode(pseudo)))
    assert (await peer.until(RST_STREAM, stream=1)).error == E.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + bytes(9), id="a wrong preface"),
        pytest.param(PREFACE + frame(PING, 0, 0, bytes(8)), id="no SETTINGS first"),
    ],
)
async def test_a_connection_that_begins_wrongly_is_closed(serve: Serve, first: bytes) -> None:
    served = await serve()
    peer = await served.connect(settings=None)
    peer.send(first)
    assert (await peer.until(GOAWAY)).error == E.PROTOCOL_ERROR
    await peer.ended()


async def test_what_must_be_taken_is_taken(serve: Serve) -> None:
    """Padding, priorities, unknown frames and settings, CONTINUATION, PING: all in one request."""
    served = await serve()
    peer = await served.connect(settings=setting(0x99, 7) + setting(3, 100))
    block = peer.block()
    priority = bytes(5)
    peer.send(
        frame(0x42, 0xFF, 0, b"unknown"),
        frame(PING, 0, 0, b"12345678"),
        frame(PRIORITY, 0, 7, priority),
        frame(PING, 1, 0, b"an answer"[:8]),
        frame(0x10, 0, 0, struct.pack(">I", 1) + b"u=3"),  # PRIORITY_UPDATE, RFC 9218
        frame(WINDOW_UPDATE, 0, 2**31, increment(5)),  # of stream 0: the reserved bit is ignored
        frame(HEADERS, PADDED | 0x20, 1, b"\x02" + priority + block[:3] + bytes(2)),
        frame(CONTINUATION, 0, 1, block[3:5]),
        frame(CONTINUATION, END_HEADERS, 1, block[5:]),
        frame(DATA, PADDED, 1, b"\x03" + message(b"hello")[:4] + bytes(3)),
        frame(DATA, 0, 1, message(b"hello")[4:]),
        frame(DATA, PADDED, 1, b"\x00"),
        frame(
            HEADERS,
            END_HEADERS | END_STREAM,
            1,
            peer.encode({"a-trailer": "of which gRPC has none"}),
        ),
    )
    await peer.until(SETTINGS, flags=1)
    pong = await peer.until(PING, flags=1)
    assert pong.payload == b"12345678"
    body, trailers = await peer.answer(1)
    assert body == b"hello" and trailers["grpc-status"] == "0"


async def test_a_peer_that_ends_what_the_server_has_ended_is_not_at_fault(serve: Serve) -> None:
    """Its frames and the server's RST_STREAM have crossed."""
    served = await serve(Limits(nuisances=20, nuisances_per_second=1.0))
    peer = await served.connect()
    for stream in range(1, 21, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, peer.block("/a.B/Nothing")))
        await peer.until(RST_STREAM, stream=stream)
        peer.send(*[frame(DATA, 0, stream, bytes(16384))] * 50)
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, peer.encode({"a": "b"})))
    peer.ask(21)
    assert (await peer.answer(21))[0] == b"hi"


async def test_windows_are_kept_when_settings_make_them_negative(serve: Serve) -> None:
    served = await serve()
    peer = await served.connect(settings=setting(4, 100))
    peer.ask(1, body=bytes(1000))
    got = 0
    while got < 100:
        got += len((await peer.until(DATA, stream=1)).payload)
    assert got == 100
    peer.send(frame(SETTINGS, 0, 0, setting(4, 20)))  # the window is -80 now
    peer.send(frame(WINDOW_UPDATE, 0, 1, increment(90)))  # and 10 now
    assert len((await peer.until(DATA, stream=1)).payload) == 10
    peer.send(frame(WINDOW_UPDATE, 0, 1, increment(10_000)))
    while got < 1005 - 10:
        got += len((await peer.until(DATA, stream=1)).payload)
    assert got == 1005 - 10


async def test_larger_windows_are_used_after_the_settings_that_bring_them_are_acknowledged(
    serve: Serve,
) -> None:
    served = await serve()
    peer = await served.connect(settings=setting(4, 0))
    peer.ask(1)
    await peer.until(HEADERS, stream=1)
    peer.send(frame(SETTINGS, 0, 0, setting(4, 1000)))
    while (got := await peer.read()).kind != SETTINGS or not got.flags:
        assert got.kind != DATA
    assert (await peer.answer(1))[0] == b"hi"


async def test_a_handler_hears_of_room_in_a_window_that_was_used_to_the_byte(serve: Serve) -> None:
    """As the relay sends: only while all has gone out."""

    async def careful(call: ServerCall) -> None:
        room = asyncio.Event()
        call.on_writable(room.set)
        for _ in range(3):
            call.send(bytes(10))
            while not call.writable:
                room.clear()
                await room.wait()

    served = await serve(Careful=careful)
    peer = await served.connect(settings=setting(4, 15))  # as long as a message
    peer.ask(1, "/a.B/Careful")
    for _ in range(2):
        assert len((await peer.until(DATA, stream=1)).payload) == 15
        peer.send(frame(WINDOW_UPDATE, 0, 1, increment(15)))
    assert len((await peer.answer(1))[0]) == 10


async def test_streams_share_a_small_connection_window_fairly(serve: Serve) -> None:
    served = await serve()
    peer = await served.connect(settings=setting(4, 2**30))
    streams = [1, 3, 5, 7]
    for stream in streams:
        peer.ask(stream, body=bytes(200_000))
    received = dict.fromkeys(streams, 0)
    while sum(received.values()) < 65535:  # the connection's first window
        data = await peer.until(DATA)
        received[data.stream] += len(data.payload)
    for _ in range(6):
        peer.send(frame(WINDOW_UPDATE, 0, 0, increment(65536)))
        for _ in range(4):
            data = await peer.until(DATA)
            received[data.stream] += len(data.payload)
    # The first one may have had a window to itself, and a frame more than its share since.
    assert min(received.values()) >= max(received.values()) - 65536 - 2 * 16384, received


async def test_a_handler_that_reads_nothing_is_sent_no_more_than_a_window(serve: Serve) -> None:
    released = asyncio.Event()

    async def late(call: ServerCall) -> None:
        await released.wait()
        while (body := await call.receive()) is not None:
            call.send(b"%d" % len(body))

    served = await serve(Limits(stream_window=70_000), Late=late)
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Late")))
    peer.send(*[frame(DATA, 0, 1, message(bytes(9995)))] * 7, frame(PING, 0, 0, bytes(8)))
    while (got := await peer.read()).kind != PING:
        assert got.kind != WINDOW_UPDATE or got.stream == 0
    released.set()
    assert (await peer.until(WINDOW_UPDATE, stream=1)).error == 70_000
    peer.send(frame(DATA, END_STREAM, 1, message(bytes(9995))))
    assert (await peer.answer(1))[0].endswith(b"9995")


async def test_data_beyond_a_window_ends_its_stream(serve: Serve) -> None:
    async def deaf(call: ServerCall) -> None:
        await asyncio.Event().wait()

    served = await serve(Limits(stream_window=70_000), Deaf=deaf)
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Deaf")))
    peer.send(*[frame(DATA, 0, 1, message(bytes(9996)))] * 7)
    assert (await peer.until(RST_STREAM, stream=1)).error == E.FLOW_CONTROL_ERROR


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({":method": "GET"}, id="GET"),
        pytest.param({":method": "POST", "content-type": "application/json"}, id="JSON"),
        pytest.param({":method": "POST", "content-type": "application/grpc-web"}, id="grpc-web"),
    ],
)
async def test_what_is_no_grpc_is_told_so(serve: Serve, headers: dict[str, str]) -> None:
    served = await serve()
    peer = await served.connect()
    pseudo = {":scheme": "http", ":path": "/a.B/Echo", **headers}
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.encode(pseudo)))
    headers = peer.decode((await peer.until(HEADERS, stream=1)).payload)
    assert headers[":status"] == "415"
    assert b"gRPC" in (await peer.until(DATA, stream=1)).payload
