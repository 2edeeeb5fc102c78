"""The router as a process: ports, the control channel, and its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from mii import control
from mii.errors import InvalidArgument, PortInUse, Unavailable
from mii.status import error_of_call
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess
from tests.router.test_inference import request_of


def test_the_router_loads_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, mii.router.main\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert output.stdout == "[]\n"


def test_the_running_router_has_no_torch_in_its_memory(start_router: StartRouter) -> None:
    router = start_router()
    assert "torch" not in Path(f"/proc/{router.process.pid}/maps").read_text()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(start_router: StartRouter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = start_router(port=port)
        assert isinstance(router.first, control.Failed)
        error = router.first.to_error()
        assert isinstance(error, PortInUse)
        assert f"port {port} is in use" in str(error)
        assert router.process.wait(10) == 1


def test_a_rest_port_that_was_asked_for_and_is_taken_is_an_error(
    start_router: StartRouter,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = start_router(rest_port=port)
        assert isinstance(router.first, control.Failed)
        assert f"rest_port {port} is in use" in router.first.message


def test_a_port_that_nobody_asked_for_gives_way(start_router: StartRouter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = start_router(
            port=port, port_is_default=True, rest_port=port, rest_port_is_default=True
        )
        assert isinstance(router.first, control.Ready)
        assert len({port, router.first.port, router.first.rest_port}) == 3


def test_two_routers_never_share_a_port(start_router: StartRouter) -> None:
    first = start_router(enable_rest=False)
    second = start_router(enable_rest=False, port=first.port)
    assert isinstance(second.first, control.Failed)
    assert second.first.kind == PortInUse.code


def test_without_rest_there_is_no_gateway(start_router: StartRouter) -> None:
    router = start_router(enable_rest=False)
    assert isinstance(router.first, control.Ready)
    assert router.first.rest_port is None


def loopbacks() -> list[str]:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ["127.0.0.1", "[::1]"]
    except OSError:
        return ["127.0.0.1"]


@pytest.mark.parametrize("address", loopbacks())
def test_localhost_is_every_loopback_address(start_router: StartRouter, address: str) -> None:
    router = start_router()
    assert isinstance(router.first, control.Ready)
    with grpc.insecure_channel(f"{address}:{router.port}") as channel:
        HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    with urllib.request.urlopen(f"http://{address}:{router.first.rest_port}/live") as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "0.0.0.0", *(["::1", "::"] if loopbacks()[1:] else [])]
)
def test_a_host_is_listened_on_as_given(start_router: StartRouter, host: str) -> None:
    router = start_router(host=host, rest_host=host)
    assert isinstance(router.first, control.Ready)
    address = "[::1]" if ":" in host else "127.0.0.1"
    with grpc.insecure_channel(f"{address}:{router.port}") as channel:
        HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    with urllib.request.urlopen(f"http://{address}:{router.first.rest_port}/live") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_an_error(start_router: StartRouter, host: str) -> None:
    router = start_router(host=host)
    assert isinstance(router.first, control.Failed)
    assert isinstance(router.first.to_error(), InvalidArgument)
    assert host in router.first.message


def test_the_router_ends_with_its_supervisor(start_router: StartRouter) -> None:
    router = start_router()
    router.control.close()
    assert router.process.wait(10) != 0


def test_stop_ends_the_router_and_what_it_was_doing(
    start_router: StartRouter, worker_thread: WorkerThread, workers: list[FakeWorker]
) -> None:
    router = start_router()
    router.tell(workers[0])
    router.wait_for(HealthCheckResponse.SERVING)
    call = router.inference.Generate(request_of("<hold>"), timeout=20)
    worker_thread.until(workers[0], lambda w: w.running == 1)
    router.control.send(control.Stop())
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(error_of_call(caught.value), Unavailable)
    assert router.process.wait(10) == 0
    worker_thread.until(workers[0], lambda w: w.running == 0)


def test_sigterm_ends_the_router(start_router: StartRouter) -> None:
    router = start_router()
    router.process.terminate()
    assert router.process.wait(10) == 0


def test_reflection_lists_the_services(router: RouterProcess) -> None:
    request = ServerReflectionRequest(list_services="")
    stub = ServerReflectionStub(router.channel)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {"mii.v1.Inference", "modelresponse.ModelResponse", "grpc.health.v1.Health"} <= names
