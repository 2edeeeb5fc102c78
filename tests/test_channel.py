"""Options of servers and channels, where C-core's own would do harm."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import pytest

from mii.channel import server_options

# Of HTTP/2 (RFC 9113), section 6. A frame: length, type, flags, stream, payload.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
_PING: Final = b"\0\0\x08\6\0\0\0\0\0"
_PING_TYPE, _GOAWAY_TYPE, _ACK = 6, 7, 1


async def test_two_servers_never_share_a_port() -> None:
    first = grpc.aio.server(options=server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    second = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)


async def until_acknowledged(reader: asyncio.StreamReader, payload: bytes) -> None:
    """Read frames until the server has answered a ping, which it refuses with GOAWAY."""
    while True:
        header = await reader.readexactly(9)
        content = await reader.readexactly(int.from_bytes(header[:3]))
        assert header[3] != _GOAWAY_TYPE, content
        if header[3] == _PING_TYPE and header[4] & _ACK and content == payload:
            return


async def test_clients_may_ping_often_and_without_calls() -> None:
    faster = {"grpc.http2.min_ping_interval_without_data_ms": 1}  # in place of seconds
    options = [(name, faster.get(name, value)) for name, value in server_options()]
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_PREFACE + _SETTINGS)
    for number in range(10):
        await asyncio.sleep(0.005)  # longer than the interval
        payload = number.to_bytes(8)
        writer.write(_PING + payload)
        await until_acknowledged(reader, payload)
    writer.close()
    await server.stop(None)
