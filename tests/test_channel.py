"""Options of servers and channels, where C-core's own would do harm."""

from __future__ import annotations

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
