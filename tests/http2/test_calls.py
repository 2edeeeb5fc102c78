"""Calls of C-core's client to our server."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import pytest

from mii.http2.limits import Limits
from mii.http2.server_call import ServerCall
from tests.http2.conftest import HEADERS, Serve, Served

ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def channel_to(served: Served) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(served.address, ANY_SIZE)


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_message_and_metadata_go_both_ways(serve: Serve) -> None:
    async with channel_to(await serve()) as channel:
        call = channel.unary_unary("/a.B/Echo")(b"hello", metadata=(("asked", "42"),))
        assert await call == b"hello"
        assert ("first", "42") in tuple(await call.initial_metadata())
        assert ("last", "yes") in tuple(await call.trailing_metadata())


async def test_a_stream_comes_in_order(serve: Serve) -> None:
    async with channel_to(await serve()) as channel:
        call = channel.unary_stream("/a.B/Count")(b"5000")
        assert [int(each) async for each in call] == list(range(5000))


async def test_a_conversation_goes_message_by_message(serve: Serve) -> None:
    async with channel_to(await serve()) as channel:
        call = channel.stream_stream("/a.B/Converse")()
        for word in (b"one", b"two"):
            await call.write(word)
            assert await call.read() == word.upper()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_large_messages_pass_both_ways(serve: Serve) -> None:
    body = os.urandom(64 * 2**20)
    async with channel_to(await serve()) as channel:
        assert await channel.unary_unary("/a.B/Echo")(body) == body


@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Deflate, grpc.Compression.Gzip]
)
async def test_compressed_requests_are_read(serve: Serve, compression: grpc.Compression) -> None:
    body = b"abc" * 10_000
    async with channel_to(await serve()) as channel:
        assert await channel.unary_unary("/a.B/Echo")(body, compression=compression) == body


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_beyond_the_limit_is_refused_packed_or_not(
    serve: Serve, compression: grpc.Compression
) -> None:
    served = await serve(Limits(max_message_bytes=1000))
    async with channel_to(served) as channel:
        error = await error_of(
            channel.unary_unary("/a.B/Echo")(bytes(1001), compression=compression)
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")
        assert await channel.unary_unary("/a.B/Echo")(bytes(1000)) == bytes(1000)


async def test_statuses_carry_their_message_and_metadata(serve: Serve) -> None:
    async with channel_to(await serve()) as channel:
        error = await error_of(channel.unary_unary("/a.B/Refuse")(b""))
        assert error.code() is grpc.StatusCode.ABORTED
        assert error.details() == "d\u00e9j\u00e0 vu, 100 %\n"
        assert ("why", "because") in tuple(error.trailing_metadata())
        error = await error_of(channel.unary_unary("/a.B/Fail")(b""))
        assert error.code() is grpc.StatusCode.INTERNAL
        error = await error_of(channel.unary_unary("/a.B/Nothing")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_ends_the_call_and_its_handler(serve: Serve) -> None:
    served = await serve()
    async with channel_to(served) as channel:
        error = await error_of(channel.unary_unary("/a.B/Wait")(b"", timeout=0.1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until_idle()
    assert len(served.noted) == 1


async def test_a_cancellation_ends_the_handler_and_is_told_from_a_lost_connection(
    serve: Serve,
) -> None:
    served = await serve()
    async with channel_to(served) as channel:
        call = channel.unary_stream("/a.B/Wait")(b"")
        await call.initial_metadata()
        call.cancel()
        while not served.noted:
            await asyncio.sleep(0.001)
        assert not served.noted[0].with_connection
    peer = await served.connect()
    peer.ask(1, "/a.B/Wait")
    await peer.until(HEADERS, stream=1)
    peer.close()
    while len(served.noted) < 2:
        await asyncio.sleep(0.001)
    assert served.noted[1].with_connection


async def test_five_hundred_connections_at_once_are_all_answered(serve: Serve) -> None:
    served = await serve()

    async def ask() -> None:
        peer = await served.connect()
        peer.ask(1)
        assert (await peer.answer(1))[0] == b"hi"
        peer.close()

    await asyncio.gather(*(ask() for _ in range(500)))
    await served.until_idle()


async def test_a_server_that_stops_lets_calls_end_and_refuses_new_ones(serve: Serve) -> None:
    released = asyncio.Event()

    async def held(call: ServerCall) -> None:
        call.send(await call.receive_only())
        await released.wait()
        call.send(b"end")

    served = await serve(Held=held)
    async with channel_to(served) as channel:
        call = channel.unary_stream("/a.B/Held")(b"begin")
        assert await call.read() == b"begin"
        stopping = asyncio.ensure_future(served.server.stop(5.0))
        await asyncio.sleep(0)
        released.set()
        assert await call.read() == b"end"
        assert await call.code() is grpc.StatusCode.OK
        await stopping
        error = await error_of(channel.unary_unary("/a.B/Echo")(b""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
