"""Peers that mean harm, or have lost their way: each is told off, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from mii.http2.frames import ErrorCode
from mii.http2.limits import Limits
from mii.http2.server_call import ServerCall
from mii.rpc.reflection import reflection_handlers
from tests.http2.conftest import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SECONDS,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    Serve,
    frame,
    message,
)

CALM = ErrorCode.ENHANCE_YOUR_CALM
# As in production, but soon reached.
LOW = Limits(nuisances=100, nuisances_per_second=1.0)


def rapid_reset(peer: Peer) -> bytes:
    """CVE-2023-44487."""
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, peer.block())
        + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 1001, 2)
    )


FLOODS: dict[str, Callable[[Peer], bytes]] = {
    "rapid reset": rapid_reset,
    "PING": lambda peer: frame(PING, 0, 0, bytes(8)) * 500,
    "SETTINGS": lambda peer: frame(SETTINGS, 0, 0) * 500,
    "PRIORITY": lambda peer: frame(PRIORITY, 0, 1, bytes(5)) * 500,
    "frames of an unknown type": lambda peer: frame(0x77, 0, 0, b"x") * 500,
    "empty DATA": lambda peer: (
        frame(HEADERS, END_HEADERS, 1, peer.block()) + frame(DATA, 0, 1) * 500
    ),
    "empty CONTINUATION": lambda peer: (
        frame(HEADERS, 0, 1, peer.block()) + frame(CONTINUATION, 0, 1) * 500
    ),
    "DATA on closed streams": lambda peer: (
        frame(HEADERS, END_HEADERS, 1, peer.block())
        + frame(RST_STREAM, 0, 1, bytes(4))
        + frame(DATA, 0, 1, b"x") * 500
    ),
    "malformed requests": lambda peer: b"".join(
        frame(HEADERS, END_HEADERS, stream, peer.block(te="gzip")) for stream in range(1, 1001, 2)
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_its_connection(serve: Serve, flood: str) -> None:
    served = await serve(LOW)
    peer = await served.connect()
    peer.send(FLOODS[flood](peer))
    assert (await peer.until(GOAWAY)).error == CALM
    await peer.ended()
    await served.until_idle()
    await served.still_serves()


async def test_a_client_that_cancels_now_and_then_is_no_flood(serve: Serve) -> None:
    served = await serve(Limits(nuisances=50, nuisances_per_second=1e6))
    peer = await served.connect()
    for stream in range(1, 201, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, peer.block()))
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        peer.send(frame(PING, 0, 0, bytes(8)))
        await peer.until(PING, flags=1)
    peer.ask(201)
    assert (await peer.answer(201))[0] == b"hi"


def large_headers(peer: Peer) -> bytes:
    block = peer.block(big="x" * 1_000_000)
    parts = [block[at : at + 16384] for at in range(0, len(block), 16384)]
    frames = [frame(HEADERS, 0, 3, parts[0])]
    frames += [frame(CONTINUATION, 0, 3, part) for part in parts[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, 3, parts[-1])])


def hpack_bomb(peer: Peer) -> bytes:
    """A small block that refers to a large entry again and again."""
    entry = b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000  # literal with indexing: index 62 from here on
    return frame(HEADERS, END_HEADERS, 3, entry + b"\xbe" * 12000)


@pytest.mark.parametrize("attack", [large_headers, hpack_bomb])
async def test_headers_beyond_the_limit_end_the_connection_but_not_its_calls(
    serve: Serve, attack: Callable[[Peer], bytes]
) -> None:
    served = await serve()
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()))
    peer.send(attack(peer), frame(DATA, END_STREAM, 3, message(b"which nobody looks at")))
    goaway = await peer.until(GOAWAY)
    assert goaway.error == CALM and int.from_bytes(goaway.payload[:4], "big") == 1
    peer.send(frame(DATA, END_STREAM, 1, message(b"hi")))
    assert (await peer.answer(1))[0] == b"hi"
    await peer.ended()
    await served.until_idle()
    await served.still_serves()


async def test_streams_beyond_the_limit_are_refused_and_may_be_tried_again(serve: Serve) -> None:
    served = await serve(Limits(max_streams=10))
    peer = await served.connect()
    for stream in range(1, 22, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, peer.block()))
    refused = await peer.until(RST_STREAM)
    assert (refused.stream, refused.error) == (21, ErrorCode.REFUSED_STREAM)
    peer.send(frame(DATA, END_STREAM, 1, message(b"hi")))
    assert (await peer.answer(1))[0] == b"hi"


async def test_a_client_that_opens_no_window_costs_its_own_answer_alone(serve: Serve) -> None:
    served = await serve(Limits(request_seconds=0.1, housekeeping_seconds=0.05))
    peer = await served.connect(settings=struct.pack(">HI", 4, 0))
    peer.ask(1, body=bytes(5000))
    reset = await peer.until(RST_STREAM, stream=1)
    assert reset.error == ErrorCode.CANCEL
    await served.until_idle()
    await served.still_serves()


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        pytest.param(b"", Limits(preface_seconds=0.1, housekeeping_seconds=0.05), id="nothing"),
        pytest.param(
            b"PRI * HT", Limits(preface_seconds=0.1, housekeeping_seconds=0.05), id="half a preface"
        ),
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            Limits(preface_seconds=0.1, housekeeping_seconds=0.05),
            id="no more",
        ),
    ],
)
async def test_a_connection_that_does_not_begin_is_closed(
    serve: Serve, sent: bytes, limits: Limits
) -> None:
    served = await serve(limits)
    peer = await served.connect(settings=None)
    peer.send(sent)
    await peer.ended()
    assert not served.server.connections


async def test_a_header_block_that_does_not_end_closes_its_connection(serve: Serve) -> None:
    served = await serve(Limits(headers_seconds=0.1, housekeeping_seconds=0.05))
    peer = await served.connect()
    peer.send(frame(HEADERS, 0, 1, peer.block()))
    await peer.ended()
    assert not served.server.connections


async def test_a_request_that_does_not_end_is_reset(serve: Serve) -> None:
    served = await serve(Limits(request_seconds=0.1, housekeeping_seconds=0.05))
    peer = await served.connect()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()))
    assert (await peer.until(RST_STREAM, stream=1)).error == ErrorCode.CANCEL
    await served.until_idle()


async def test_a_peer_that_is_gone_without_a_word_is_found(serve: Serve) -> None:
    served = await serve(Limits(ping_seconds=0.05, pong_seconds=0.1, housekeeping_seconds=0.02))
    peer = await served.connect()
    peer.ask(1, "/a.B/Wait")
    await peer.ended()  # it has answered no PING
    await served.until_idle()
    assert served.noted[0].with_connection


async def test_a_peer_that_never_reads_is_cut_off_before_much_waits_for_it(serve: Serve) -> None:
    limits = Limits(max_unsent_control_bytes=2**14, nuisances=10**9)
    served = await serve(limits, buffer_bytes=2**14)
    peer = await served.connect()
    try:
        async with asyncio.timeout(10):
            while served.server.connections:
                peer.send(frame(PING, 0, 0, bytes(8)) * 1000)
                await asyncio.sleep(0)
                await peer.drain()
    except ConnectionError:
        pass
    assert not served.server.connections
    await served.still_serves()


async def test_answers_to_a_peer_that_never_reads_are_bounded(serve: Serve) -> None:
    """Each request is in order, and each answer is short: what counts is that nobody takes them."""
    limits = Limits(max_streams=4000, max_unsent_control_bytes=2**14)
    served = await serve(limits, buffer_bytes=2**14)
    peer = await served.connect()
    await peer.pong()
    (connection,) = served.server.connections
    block, stream = peer.block("/a.B/Nothing"), 1
    try:
        async with asyncio.timeout(SECONDS):
            while connection in served.server.connections:
                for _ in range(500):
                    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
                    stream += 2
                await asyncio.sleep(0)
                await peer.drain()
    except ConnectionError:
        pass  # the server has cut it off
    assert connection not in served.server.connections
    assert stream < 2 * 20_000
    await served.until_idle()
    await served.still_serves()


async def test_questions_whose_answers_are_not_read_are_left_unread(serve: Serve) -> None:
    """An answer of reflection is many times as long as its question."""
    names = ["mii.v1.Inference"]
    reflect = reflection_handlers(names)[
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    ]
    served = await serve(Reflect=reflect)
    peer = await served.connect(settings=struct.pack(">HI", 4, 0))
    question = message(ServerReflectionRequest(file_containing_symbol=names[0]).SerializeToString())
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Reflect")))
    for _ in range(15):
        peer.send(frame(DATA, 0, 1, question * 300))
    await peer.pong()
    (connection,) = served.server.connections
    assert connection.streams[1].unsent_bytes < 2**16
    assert served.server.held_bytes <= 15 * 300 * (len(question) + 64)
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 2**30)))
    peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30)))
    peer.send(frame(DATA, END_STREAM, 1))
    trailers = await peer.until(HEADERS, stream=1, flags=END_STREAM)
    assert trailers.payload
    assert served.server.held_bytes == 0


async def test_messages_that_the_handler_does_not_take_are_bounded_all_together(
    serve: Serve,
) -> None:
    async def deaf(call: ServerCall) -> None:
        await asyncio.Event().wait()

    served = await serve(Deaf=deaf, max_held_bytes=100_000)
    peer = await served.connect()
    bomb = gzip.compress(bytes(2**20))
    packed = b"\x01" + len(bomb).to_bytes(4, "big") + bomb
    for stream, data in ((1, message(b"") * 2000), (3, packed)):
        block = peer.block("/a.B/Deaf", **{"grpc-encoding": "gzip"})
        peer.send(frame(HEADERS, END_HEADERS, stream, block), frame(DATA, 0, stream, data))
        trailers = peer.decode((await peer.until(HEADERS, stream=stream)).payload)
        assert trailers["grpc-status"] == "8"
        assert served.server.held_bytes == 0
    await served.still_serves()


async def test_streams_that_are_opened_and_left_are_reset_in_time(serve: Serve) -> None:
    served = await serve(Limits(request_seconds=1.0, housekeeping_seconds=0.05))
    peer = await served.connect()
    for stream in range(1, 2 * 4096, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, peer.block("/a.B/Converse")))
    async with asyncio.timeout(SECONDS):
        while served.server.calls_under_way < 1000:
            await asyncio.sleep(0.001)
    await served.still_serves()
    for _ in range(4096):
        assert (await peer.until(RST_STREAM)).error == ErrorCode.CANCEL
    await served.until_idle()
    (connection,) = served.server.connections
    assert not connection.streams
    peer.ask(2 * 4096 + 1)
    assert (await peer.answer(2 * 4096 + 1))[0] == b"hi"


async def test_a_server_stops_in_time_whatever_its_clients_do(serve: Serve) -> None:
    served = await serve()
    silent = await served.connect(settings=None)
    stuck = await served.connect(settings=struct.pack(">HI", 4, 0))
    stuck.ask(1, body=bytes(10**5))
    await stuck.until(HEADERS, stream=1)
    begun = await served.connect()
    begun.ask(1, "/a.B/Wait")
    await begun.until(HEADERS, stream=1)
    async with asyncio.timeout(2.0):
        await served.server.stop(0.1)
    assert not served.server.connections and not served.server.calls_under_way
    trailers = begun.decode((await begun.until(HEADERS, stream=1)).payload)
    assert trailers["grpc-status"] == "14"
    assert (await begun.until(GOAWAY)).payload[:4] == (1).to_bytes(4, "big")
    for peer in (silent, stuck, begun):
        await peer.ended()


async def test_many_idle_connections_and_streams_hold_up_nobody(serve: Serve) -> None:
    served = await serve()
    peers = [await served.connect() for _ in range(200)]
    for peer in peers[:20]:
        for stream in range(1, 101, 2):
            peer.send(frame(HEADERS, END_HEADERS, stream, peer.block()))
    while served.server.calls_under_way < 20 * 50:
        await asyncio.sleep(0.001)
    await served.still_serves()
    for peer in peers:
        peer.close()
    await served.until_idle()


async def test_messages_that_never_become_whole_are_bounded_all_together(serve: Serve) -> None:
    served = await serve(max_held_bytes=100_000)
    peer = await served.connect()
    begun = message(bytes(90_000))[:60_000]
    for stream in (1, 3):
        peer.send(frame(HEADERS, END_HEADERS, stream, peer.block()))
        for at in range(0, len(begun), 10_000):
            peer.send(frame(DATA, 0, stream, begun[at : at + 10_000]))
    trailers = peer.decode((await peer.until(HEADERS, stream=3)).payload)
    assert trailers["grpc-status"] == "8"
    peer.send(frame(DATA, END_STREAM, 1, message(bytes(90_000))[60_000:75_000]))
    peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1000)))
    peer.send(frame(RST_STREAM, 0, 1, bytes(4)))
    await served.until_idle()
    await served.still_serves()


async def test_a_flood_of_small_frames_leaves_others_their_turn(serve: Serve) -> None:
    async def hold(call: ServerCall) -> None:
        await asyncio.Event().wait()

    served = await serve(Hold=hold)
    peer = await served.connect()
    data = frame(DATA, 0, 1, message(b"x"))
    count = 70_000
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("/a.B/Hold")), data * count)
    held = [0]  # at each turn of the loop
    async with asyncio.timeout(SECONDS):
        while held[-1] < 65 * count:  # a byte each, and what it takes to keep it
            await asyncio.sleep(0)
            held.append(served.server.held_bytes)
    most = max(after - before for before, after in pairwise(held))
    assert most < held[-1] / 10
