"""How the server's calls end, as a peer sees it that looks at every frame."""

from __future__ import annotations

import asyncio
import struct

import pytest

from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.server_call import ServerCall
from tests.http2.conftest import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    WINDOW_UPDATE,
    Peer,
    Serve,
    frame,
    message,
)


async def trailers_of(peer: Peer, stream: int = 1) -> dict[str, str]:
    """The last headers of a call."""
    while True:
        got = await peer.until(HEADERS)
        headers = peer.decode(got.payload)
        if got.stream == stream and got.flags & END_STREAM:
            return headers


async def test_a_deadline_is_the_servers_too(serve: Serve) -> None:
    served = await serve()
    peer = await served.connect()
    peer.ask(1, "/a.B/Wait", **{"grpc-timeout": "30m"})
    assert (await trailers_of(peer))["grpc-status"] == "4"
    assert len(served.noted) == 1
    peer.ask(3, "/a.B/Wait", **{"grpc-timeout": "soon"})
    trailers = await trailers_of(peer, 3)
    assert trailers["grpc-status"] == "13" and "grpc-timeout" in trailers["grpc-message"]
    await served.until_idle()


async def test_an_unknown_compression_is_told_which_ones_are_known(serve: Serve) -> None:
    served = await serve()
    peer = await served.connect()
    peer.ask(1, **{"grpc-encoding": "snappy"})
    trailers = await trailers_of(peer)
    assert trailers["grpc-status"] == "12" and ":status" in trailers
    assert trailers["grpc-accept-encoding"] == "identity,gzip,deflate"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", "13", id="no message"),
        pytest.param(message(b"a") * 2, "13", id="two messages"),
        pytest.param(message(b"hello")[:-1], "13", id="part of a message"),
        pytest.param(message(b"a") + b"\0", "13", id="a message and part of another"),
        pytest.param(b"\x01\0\0\0\x01a", "13", id="compressed by nothing"),
        pytest.param(b"\0\xff\xff\xff\xff", "8", id="a message of 4 GB"),
    ],
)
async def test_a_body_that_is_not_one_message_ends_the_call(
    serve: Serve, body: bytes, status: str
) -> None:
    served = await serve()
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()), frame(DATA, END_STREAM, 1, body))
    assert (await trailers_of(peer))["grpc-status"] == status
    await served.until_idle()
    assert served.server.held_bytes == 0


@pytest.mark.parametrize("key", ["key", "K"])
async def test_metadata_that_cannot_be_sent_ends_the_call_as_internal(
    serve: Serve, key: str
) -> None:
    value = "d\u00e9j\u00e0" if key == "key" else "v"

    async def trail(call: ServerCall) -> None:
        call.send(await call.receive_only())
        call.trailing_metadata = ((key, value),)

    async def lead(call: ServerCall) -> None:
        call.send_initial_metadata(((key, value),))

    async def refuse(call: ServerCall) -> None:
        raise CallFault(StatusCode.NOT_FOUND, "no", ((key, value),))

    served = await serve(Trail=trail, Lead=lead, RefuseOddly=refuse)
    peer = await served.connect()
    for stream, name in ((1, "Trail"), (3, "Lead"), (5, "RefuseOddly")):
        peer.ask(stream, f"/a.B/{name}")
        assert (await trailers_of(peer, stream))["grpc-status"] == "13"
    await served.until_idle()


async def test_what_fails_when_there_is_room_again_ends_its_call_alone(serve: Serve) -> None:
    async def careless(call: ServerCall) -> None:
        call.on_writable(lambda: 1 // 0)
        call.send(bytes(1000))
        await asyncio.Event().wait()

    served = await serve(Careless=careless)
    peer = await served.connect(settings=struct.pack(">HI", 4, 10))
    peer.ask(1, "/a.B/Careless")
    await peer.until(DATA, stream=1)
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 10_000)))
    trailers = await trailers_of(peer)
    assert trailers["grpc-status"] == "13" and "ZeroDivision" in trailers["grpc-message"]
    peer.ask(3, body=b"")
    assert (await peer.answer(3))[0] == b""
    await served.until_idle()


async def test_a_server_that_stops_waits_for_answers_to_be_read(serve: Serve) -> None:
    served = await serve()
    peer = await served.connect(settings=struct.pack(">HI", 4, 0))
    peer.ask(1, body=bytes(100_000))
    await peer.until(HEADERS, stream=1)
    while served.server.calls_under_way:  # the handler has done its work
        await asyncio.sleep(0.001)
    stopping = asyncio.ensure_future(served.server.stop(10.0))
    assert (await peer.until(GOAWAY)).payload[:4] == b"\x7f\xff\xff\xff"
    peer.ask(3, body=b"")  # on its way when the server began to stop
    peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 10**6)))
    for stream in (3, 1):
        peer.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", 10**6)))
        body, trailers = await peer.answer(stream)
        assert len(body) == (100_000 if stream == 1 else 0) and trailers["grpc-status"] == "0"
    last = await peer.until(GOAWAY)
    assert (int.from_bytes(last.payload[:4], "big"), last.error) == (3, 0)
    await peer.ended()
    peer.close()
    await asyncio.wait_for(stopping, 2)


async def test_the_last_reset_of_a_connection_arrives(serve: Serve) -> None:
    """Which is closed when its last stream ends."""
    served = await serve()
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()))
    await peer.pong()
    (connection,) = served.server.connections
    connection.drain()
    peer.send(frame(WINDOW_UPDATE, 0, 1, bytes(4)))
    assert (await peer.until(RST_STREAM, stream=1)).error == 1
    await peer.ended()
