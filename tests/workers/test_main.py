"""The worker's process: how it starts, serves, ends, and tells why it cannot."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mii.api import configure_engine
from mii.channel import channel_options
from mii.client import MIIClient
from mii.config import DeploymentConfig
from mii.control import Failed, Message, Progress, Ready, Stop
from mii.errors import ModelError, Unavailable
from mii.launchers.local import Child, LocalLauncher
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.proto.worker_pb2_grpc import WorkerStub

Launch = Callable[..., list[Child]]


@pytest.fixture(scope="module")
def launch(tiny_model: Path) -> Iterator[Launch]:
    """Starts the ranks of a replica."""
    started: list[Child] = []

    def start(
        model: Path = tiny_model, ranks: int = 1, port: int = 0, replica: int = 0
    ) -> list[Child]:
        options = {"model_name_or_path": str(tiny_model), "tensor_parallel": ranks, "threads": 1}
        engine = configure_engine(options, "serve()", lambda *_: None)
        engine = replace(engine, model_path=str(model), tokenizer_path=str(model))
        children = LocalLauncher().start_replica(DeploymentConfig("acme", engine), replica, port)
        started.extend(children)
        return children

    yield start
    for child in started:
        child.kill()
        child.process.wait()
        child.channel.close()


def messages_until(child: Child, kind: type[Message]) -> list[Any]:
    """Return a child's messages up to the first of a kind, or to the end of the stream."""
    received: list[Any] = []
    for message in child.channel.messages():
        received.append(message)
        if isinstance(message, kind):
            break
    return received


def port_of(child: Child) -> int:
    last = messages_until(child, Ready)[-1]
    assert isinstance(last, Ready), last
    return last.port


def channel_to(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}", channel_options())


def status_of(port: int) -> StatusResponse:
    with channel_to(port) as channel:
        return WorkerStub(channel).Status(StatusRequest())


@pytest.fixture(scope="module")
def replica(launch: Launch) -> tuple[list[Child], list[int]]:
    """Two ranks of a replica, and their ports."""
    children = launch(ranks=2, replica=5)
    return children, [port_of(child) for child in children]


def test_every_rank_tells_who_it_is_and_what_it_has_done(
    replica: tuple[list[Child], list[int]],
) -> None:
    children, ports = replica
    before = [status_of(port) for port in ports]
    with MIIClient(f"127.0.0.1:{ports[0]}") as client:
        (response,) = client("hello", max_new_tokens=7, temperature=0) or []
    after = [status_of(port) for port in ports]
    for rank, status in enumerate(after):
        assert (status.replica, status.rank, status.tensor_parallel) == (5, rank, 2)
        assert status.process_id == children[rank].process.pid
        assert status.resident_bytes > 50 * 2**20
        assert status.steps >= before[rank].steps + 7
    assert after[0].generated_tokens - before[0].generated_tokens == response.generated_length == 7
    assert after[0].free_blocks == after[0].total_blocks > 0
    assert after[0].running_requests == after[0].waiting_requests == 0


def test_every_rank_serves_health_and_reflection(replica: tuple[list[Child], list[int]]) -> None:
    for rank, port in enumerate(replica[1]):
        with channel_to(port) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "mii.v1.Worker"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                health.Check(health_pb2.HealthCheckRequest(service="other"))
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.NOT_FOUND
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (listed,) = stub.ServerReflectionInfo(iter([ask]))
            names = {service.name for service in listed.list_services_response.service}
            assert ("mii.v1.Inference" in names) == (rank == 0)
            assert {"mii.v1.Worker", "grpc.health.v1.Health"} <= names


def test_a_rank_that_dies_takes_its_replica_along_with_a_reason(
    replica: tuple[list[Child], list[int]],
) -> None:
    (first, second), ports = replica
    second.process.kill()
    second.process.wait()
    with MIIClient(f"127.0.0.1:{ports[0]}") as client, pytest.raises(Unavailable) as caught:
        client("hello", max_new_tokens=7)
    words = "rank 1 of this replica has died"
    assert str(caught.value) == f"the engine has failed: {words}"
    failed = messages_until(first, Failed)[-1]
    assert isinstance(failed, Failed) and failed.message == words
    assert first.process.wait(10) == 1


def test_a_port_that_is_taken_is_left_alone_and_sigterm_ends_calls_in_time(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        preferred = int(taken.getsockname()[1])
        (child,) = launch(port=preferred)
        port = port_of(child)
        assert port != preferred
    with MIIClient(f"127.0.0.1:{port}", retry_seconds=0) as client:
        stream = client.stream("hello", ignore_eos=True, max_new_tokens=500)
        next(stream)
        child.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="stopping"):
            list(stream)
    assert child.process.wait(10) == 0
    assert time.monotonic() - began < 3
    assert messages_until(child, Failed) == []


def test_a_port_that_is_free_is_taken_and_no_worker_outlives_its_parent(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        preferred = int(server.getsockname()[1])
    (child,) = launch(port=preferred)
    received = messages_until(child, Ready)
    assert received[-1].port == preferred
    told = [message.what for message in received if isinstance(message, Progress)]
    assert told[0] == "loading PyTorch" and "loading the tokenizer" in told
    child.channel.close()
    assert child.process.wait(5) == 1


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda child: child.channel.close(), 1),
        (lambda child: child.channel.send(Stop()), 0),
        (lambda child: child.process.terminate(), 0),
    ],
    ids=["parent gone", "Stop", "SIGTERM"],
)
def test_it_ends_at_once_while_it_loads(
    launch: Launch, end: Callable[[Child], None], status: int
) -> None:
    (child,) = launch()
    messages_until(child, Progress)
    end(child)
    assert child.process.wait(5) == status


def test_why_it_cannot_start_is_its_last_word(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    (child,) = launch(model=broken)
    failed = messages_until(child, Failed)[-1]
    assert isinstance(failed, Failed)
    error = failed.to_error()
    assert isinstance(error, ModelError) and "model.safetensors" in str(error)
    assert child.process.wait(10) == 1
