"""A router process among clients that mean harm: others are served as if they were not there."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import hpack
import psutil
import pytest

from mii.proto.inference_pb2 import GenerateRequest, Prompt
from tests.http2.conftest import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
)
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import RouterProcess

BEGINNING = PREFACE + frame(SETTINGS, 0, 0)
PATH = "/mii.v1.Inference/Generate"


def request_block(path: str = PATH) -> bytes:
    headers = {":method": "POST", ":scheme": "http", ":path": path}
    return hpack.Encoder().encode([*headers.items(), ("content-type", "application/grpc")])


def requests(count: int, after: Callable[[int], bytes], path: str = PATH) -> Iterator[bytes]:
    for stream in range(1, 2 * count, 2):
        yield frame(HEADERS, END_HEADERS, stream, request_block(path)) + after(stream)


def rapid_reset() -> Iterator[bytes]:
    return requests(6000, lambda stream: frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))


def large_headers() -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, request_block())
    for _ in range(64):
        yield frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f\xff\x7e" + bytes(16000))


def pings() -> Iterator[bytes]:
    yield frame(PING, 0, 0, bytes(8)) * 20_000


def idle_streams() -> Iterator[bytes]:
    return requests(6000, lambda stream: b"")


def unknown_methods() -> Iterator[bytes]:
    return requests(5000, lambda stream: frame(0, END_STREAM, stream), "/no.Service/Method")


def malformed_protobuf() -> Iterator[bytes]:
    body = b"\x00\x00\x00\x00\x04\xff\xff\xff\xff"
    return requests(2000, lambda stream: frame(0, END_STREAM, stream, body))


def garbage() -> Iterator[bytes]:
    yield bytes(range(256)) * 400


ATTACKS = (
    rapid_reset,
    large_headers,
    pings,
    idle_streams,
    unknown_methods,
    malformed_protobuf,
    garbage,
)


def attack(port: int, build: Callable[[], Iterator[bytes]], connections: int) -> None:
    """Send it all and read nothing; the router may have had enough before."""
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        with connection, contextlib.suppress(OSError):
            connection.sendall(BEGINNING)
            for part in build():
                connection.sendall(part)


def ask(router: RouterProcess, timeout: float = 20.0) -> str:
    request = GenerateRequest(prompts=[Prompt(text="a b c")], stream=True)
    answer = router.inference.Generate(request, timeout=timeout)
    return "".join(delta.text for message in answer for delta in message.deltas)


@pytest.mark.parametrize("build", ATTACKS)
def test_others_are_served_during_an_attack_and_nothing_is_left_of_it(
    start_router: StartRouter, workers: list[FakeWorker], build: Callable[[], Iterator[bytes]]
) -> None:
    router = start_router()
    router.tell(*workers)
    router.wait_for(1)
    process = psutil.Process(router.process.pid)
    for _ in workers:  # the router connects to each
        assert ask(router) == "a b c "
    memory, files = process.memory_info().rss, process.num_fds()
    attacker = threading.Thread(target=attack, args=(router.port, build, 3))
    attacker.start()
    while attacker.is_alive():
        assert ask(router) == "a b c "
    attacker.join()
    assert ask(router) == "a b c "
    router.wait_until(lambda: process.num_fds() <= files)
    assert process.memory_info().rss - memory < 100 * 2**20
    assert all(worker.running == 0 for worker in workers)


def test_more_connections_than_the_shell_allows_files_are_held_and_others_served(
    start_router: StartRouter, workers: list[FakeWorker]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        router = start_router()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    router.tell(*workers)
    router.wait_for(1)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"PRI * HT", BEGINNING) * 133:
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
            idle.sendall(sent)
        assert ask(router, timeout=5.0) == "a b c "  # before any of them is sent away
