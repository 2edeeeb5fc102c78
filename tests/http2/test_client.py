"""Calls of our client to C-core's server, and to one of ours that is taken away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from mii.http2.client import Channel
from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.limits import Limits
from tests.http2.conftest import Serve

Context = grpc.aio.ServicerContext[Any, Any]


class CCore(grpc.GenericRpcHandler):
    """An echo, a stream, one that refuses and one that waits."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.remaining: float | None = None

    def service(self, details: Any) -> Any:
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "/a.B/Echo": unary(self.echo),
            "/a.B/Count": grpc.unary_stream_rpc_method_handler(self.count),
            "/a.B/Refuse": unary(self.refuse),
            "/a.B/Wait": unary(self.wait),
        }.get(details.method)

    async def echo(self, body: bytes, context: Context) -> bytes:
        self.remaining = context.time_remaining()
        metadata: Any = context.invocation_metadata()
        await context.send_initial_metadata((("got", str(dict(metadata).get("sent", ""))),))
        return body

    async def count(self, body: bytes, context: Context) -> AsyncIterator[bytes]:
        for number in range(int(body)):
            yield b"%d" % number

    async def refuse(self, body: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "d\u00e9j\u00e0 vu\n", (("why", "because"),))
        raise AssertionError

    async def wait(self, body: bytes, context: Context) -> bytes:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return b""


@pytest.fixture
async def c_core() -> AsyncIterator[tuple[CCore, Channel]]:
    handlers = CCore()
    sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=sizes)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = Channel(f"127.0.0.1:{port}", limits=Limits(), metadata=(("sent", "always"),))
    yield handlers, channel
    await channel.close()
    await server.stop(0)


async def fault_of(channel: Channel, path: str, timeout: float | None = None) -> CallFault:
    with pytest.raises(CallFault) as caught:
        await channel.unary(path, b"", timeout=timeout)
    return caught.value


async def test_messages_metadata_and_deadlines_are_understood(
    c_core: tuple[CCore, Channel],
) -> None:
    handlers, channel = c_core
    headers: dict[str, str] = {}
    messages: list[bytes] = []
    call = await channel.call(
        "/a.B/Echo", b"hello", messages.append, timeout=30, on_headers=headers.update
    )
    await call.wait()
    assert messages == [b"hello"] and headers["got"] == "always"
    assert handlers.remaining is not None and 20 < handlers.remaining <= 30.1


async def test_streams_and_large_messages_come_whole(c_core: tuple[CCore, Channel]) -> None:
    _, channel = c_core
    messages: list[bytes] = []
    await (await channel.call("/a.B/Count", b"3000", messages.append)).wait()
    assert [int(each) for each in messages] == list(range(3000))
    body = os.urandom(40 * 2**20)
    assert await channel.unary("/a.B/Echo", body) == body


async def test_statuses_are_understood(c_core: tuple[CCore, Channel]) -> None:
    _, channel = c_core
    fault = await fault_of(channel, "/a.B/Refuse")
    assert (fault.code, fault.message) == (StatusCode.ABORTED, "d\u00e9j\u00e0 vu\n")
    assert ("why", "because") in fault.metadata
    assert (await fault_of(channel, "/a.B/None")).code == StatusCode.UNIMPLEMENTED


async def test_deadlines_and_cancellations_reach_the_server(c_core: tuple[CCore, Channel]) -> None:
    handlers, channel = c_core
    fault = await fault_of(channel, "/a.B/Wait", timeout=0.1)
    assert fault.code == StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(handlers.cancelled.wait(), 10)
    handlers.waiting.clear()
    handlers.cancelled.clear()
    asking = asyncio.ensure_future(channel.unary("/a.B/Wait", b""))
    await asyncio.wait_for(handlers.waiting.wait(), 10)
    asking.cancel()
    await asyncio.wait_for(handlers.cancelled.wait(), 10)


async def test_a_server_that_stops_lets_a_call_end_and_the_next_one_finds_its_successor() -> None:
    """The server is C-core's; its successor listens on the same port."""
    handlers = CCore()
    released = asyncio.Event()

    async def hold(body: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"begin"
        await released.wait()
        yield b"end"

    class Holding(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(hold)

    async def start(handler: grpc.GenericRpcHandler, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    first, port = await start(Holding(), 0)
    channel = Channel(f"127.0.0.1:{port}", limits=Limits())
    begun = asyncio.Event()
    messages: list[bytes] = []

    def take(body: bytes) -> None:
        messages.append(body)
        begun.set()

    call = await channel.call("/a.B/Hold", b"", take)
    await asyncio.wait_for(begun.wait(), 10)
    stopping = asyncio.ensure_future(first.stop(10))
    refused = None
    while refused is None:  # until GOAWAY has come and nobody listens any more
        try:
            await (await channel.call("/a.B/Hold", b"", messages.append, timeout=0.01)).wait()
        except CallFault as fault:
            refused = fault if fault.code == StatusCode.UNAVAILABLE else None
    released.set()
    await asyncio.wait_for(call.wait(), 10)
    assert messages[0] == b"begin" and messages[-1] == b"end"
    await stopping
    second, _ = await start(handlers, port)
    assert await channel.unary("/a.B/Echo", b"again") == b"again"
    await channel.close()
    await second.stop(0)


async def test_what_fails_in_a_message_ends_the_call(c_core: tuple[CCore, Channel]) -> None:
    _, channel = c_core

    def fail(body: bytes) -> None:
        raise ZeroDivisionError

    call = await channel.call("/a.B/Count", b"100000", fail)
    with pytest.raises(ZeroDivisionError):
        await call.wait()
    assert await channel.unary("/a.B/Echo", b"still there") == b"still there"


async def test_a_lost_connection_is_unavailable_and_the_next_call_makes_a_new_one(
    serve: Serve,
) -> None:
    served = await serve()
    channel = Channel(served.address, limits=Limits())
    asking = [asyncio.ensure_future(channel.unary("/a.B/Wait", b"")) for _ in range(3)]
    while served.server.calls_under_way < 3:
        await asyncio.sleep(0.001)
    for connection in list(served.server.connections):
        connection.abort("pulled the plug")
    for each in asking:
        with pytest.raises(CallFault) as caught:
            await each
        assert caught.value.code == StatusCode.UNAVAILABLE
    assert await channel.unary("/a.B/Echo", b"again") == b"again"
    await channel.close()
    assert (await fault_of(channel, "/a.B/Echo")).code == StatusCode.UNAVAILABLE


async def test_nobody_listening_is_unavailable() -> None:
    channel = Channel("127.0.0.1:1", limits=Limits())
    fault = await fault_of(channel, "/a.B/Echo")
    assert fault.code == StatusCode.UNAVAILABLE and "127.0.0.1:1" in fault.message
    await channel.close()
