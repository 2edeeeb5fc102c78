"""One port for HTTP/2 and HTTP/1.1, with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from mii.http2.client import Channel
from mii.http2.frames import PREFACE
from mii.http2.limits import Limits
from mii.http2.listener import Switch
from mii.http2.server import Server
from mii.tls import server_context
from tests.certificates import certificate
from tests.http2.conftest import GOAWAY, PING, SECONDS, SETTINGS, Peer, Serve, frame

Protocols = Callable[[Server], Callable[[], asyncio.Protocol]]


@pytest.fixture
async def rest() -> AsyncIterator[Protocols]:
    """Serves HTTP/2 and, in the same loop, an HTTP/1.1 application that answers with the body."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"REST " + await request.read())

    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    yield lambda server: lambda: Switch(server.protocol, runner.server)
    await runner.cleanup()


@pytest.fixture(scope="session")
def localhost(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for localhost, and its key."""
    return certificate(tmp_path_factory.mktemp("certificates"), "localhost")


def only_http2(server: Server) -> Callable[[], asyncio.Protocol]:
    return lambda: Switch(server.protocol, None, b"no REST here\n", seconds=0.1)


async def talk(port: int, *sent: bytes) -> bytes:
    """Return all that the server says to some bytes, until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), SECONDS)
    finally:
        writer.close()


async def test_both_protocols_are_served_on_one_port(serve: Serve, rest: Protocols) -> None:
    served = await serve(protocol=rest)
    url = f"http://127.0.0.1:{served.port}/x"
    async with aiohttp.ClientSession() as session:
        for body in (b"", b"hello", bytes(10**6)):
            async with session.post(url, data=body) as answer:
                assert await answer.read() == b"REST " + body
            await served.still_serves()
        async with session.put(url, data=b"P") as answer:  # which begins as the preface does
            assert await answer.read() == b"REST P"


async def test_a_preface_may_come_byte_by_byte(serve: Serve, rest: Protocols) -> None:
    served = await serve(protocol=rest)
    peer = await served.connect(settings=None)
    for byte in PREFACE + frame(SETTINGS, 0, 0):
        peer.send(bytes([byte]))
        await peer.drain()
        await asyncio.sleep(0)
    await peer.pong()
    peer.ask(1)
    assert (await peer.answer(1))[0] == b"hi"


async def test_without_rest_http1_is_told_so_even_in_the_midst_of_a_large_request(
    serve: Serve,
) -> None:
    served = await serve(protocol=only_http2)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    for body in ((), (bytes(10**6),)):
        said = await talk(served.port, head, *body)
        assert said.startswith(b"HTTP/1.1 426 ") and said.endswith(b"\r\n\r\nno REST here\n")
    await served.still_serves()


@pytest.mark.parametrize("sent", [b"", b"P", PREFACE[:-1]])
async def test_first_bytes_that_do_not_come_end_the_connection(serve: Serve, sent: bytes) -> None:
    served = await serve(protocol=only_http2)
    assert await talk(served.port, sent) == b""
    await served.still_serves()


async def test_a_connection_that_begins_when_the_server_has_stopped_is_sent_away(
    serve: Serve,
) -> None:
    accepted = asyncio.Event()

    def protocol(server: Server) -> Callable[[], asyncio.Protocol]:
        def make() -> asyncio.Protocol:
            accepted.set()
            return Switch(server.protocol, None)

        return make

    served = await serve(protocol=protocol)
    peer = await served.connect(settings=None)
    await asyncio.wait_for(accepted.wait(), SECONDS)
    await served.server.stop(0)
    peer.begin()
    peer.ask(1)
    assert (await peer.until(GOAWAY)).error == 0
    assert (await peer.until(GOAWAY)).payload[:4] == bytes(4)  # stream 1 may be tried elsewhere
    await peer.ended()


def trusting(cafile: str, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cafile)
    context.set_alpn_protocols(protocols)
    return context


async def test_with_tls_alpn_names_the_protocol_and_both_are_served(
    serve: Serve, rest: Protocols, localhost: tuple[str, str]
) -> None:
    cert, key = localhost
    served = await serve(tls=server_context(cert, key), protocol=rest)
    credentials = grpc.ssl_channel_credentials(Path(cert).read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{served.port}", credentials) as channel:
        for body in (b"hello", bytes(3 * 2**20)):
            assert await channel.unary_unary("/a.B/Echo")(body) == body
    async with aiohttp.ClientSession() as session:
        url = f"https://localhost:{served.port}/x"
        async with session.post(url, data=b"hello", ssl=trusting(cert, "http/1.1")) as answer:
            assert await answer.read() == b"REST hello"
    own = Channel(f"localhost:{served.port}", limits=Limits(), tls=trusting(cert, "h2"))
    assert await own.unary("/a.B/Echo", bytes(10**6)) == bytes(10**6)
    await own.close()
    for protocol in ("h2", "http/1.1"):
        reader, writer = await asyncio.open_connection(
            "localhost", served.port, ssl=trusting(cert, protocol)
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == protocol
        writer.close()


async def test_faults_are_told_over_tls_too(serve: Serve, localhost: tuple[str, str]) -> None:
    cert, key = localhost
    served = await serve(tls=server_context(cert, key))
    peer = Peer(*await asyncio.open_connection("localhost", served.port, ssl=trusting(cert, "h2")))
    served.peers.append(peer)
    peer.begin()
    peer.send(frame(PING, 0, 1, bytes(8)))
    assert (await peer.until(GOAWAY)).error == 1
    await peer.ended()


async def test_our_client_speaks_tls_to_c_core(localhost: tuple[str, str]) -> None:
    async def echo(body: bytes, context: object) -> bytes:
        return body

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(echo)

    cert, key = (Path(each).read_bytes() for each in localhost)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, cert)]))
    await server.start()
    tls = trusting(localhost[0], "h2")
    channel = Channel(f"localhost:{port}", limits=Limits(), tls=tls)
    assert await channel.unary("/a.B/C", bytes(10**6)) == bytes(10**6)
    await channel.close()
    await server.stop(0)
