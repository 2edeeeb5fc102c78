"""Options of servers and channels, where C-core's own would do harm."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from mii.channel import server_options


async def test_two_servers_never_share_a_port() -> None:
    first = grpc.aio.server(options=server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    second = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)


async def hang(request: bytes, context: Any) -> bytes:
    await asyncio.sleep(60)
    return b""


async def test_a_call_that_waits_long_outlives_its_pings() -> None:
    faster = {"grpc.http2.min_ping_interval_without_data_ms": 10}  # in place of 5000
    options = [(name, faster.get(name, value)) for name, value in server_options()]
    server = grpc.aio.server(options=options)
    handler = grpc.unary_unary_rpc_method_handler(hang)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pings = [("grpc.keepalive_time_ms", 50), ("grpc.http2.max_pings_without_data", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=pings) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/m")(b"", timeout=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # and not: too many pings
    await server.stop(None)
