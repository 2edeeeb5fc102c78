"""Replicas that come, go and die, as clients see it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from mii import control
from mii.errors import Unavailable
from mii.status import error_of_call
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess
from tests.router.test_inference import deltas_of, error_of, request_of

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
SERVICES = [
    "",
    "mii.v1.Inference",
    "modelresponse.ModelResponse",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
]


@contextmanager
def worker_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker that can be killed, and its address."""
    command = [sys.executable, "-m", "tests.router.fake_worker", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture
def worker(worker_thread: WorkerThread) -> Iterator[FakeWorker]:
    """A worker of the test's own."""
    worker = worker_thread.start_worker()
    yield worker
    worker_thread.do(worker.stop)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_serving_once_a_replica_is_ready(
    start_router: StartRouter, worker: FakeWorker, service: str
) -> None:
    router = start_router(enable_rest=False)
    request = HealthCheckRequest(service=service)
    assert router.health.Check(request, timeout=10).status == NOT_SERVING
    router.tell(worker)
    router.wait_for(SERVING, service)
    assert router.health.Check(request, timeout=10).status == SERVING
    router.tell()
    router.wait_for(NOT_SERVING, service)


def test_liveness_and_readiness_are_two_things(start_router: StartRouter) -> None:
    router = start_router(enable_rest=False)
    router.wait_for(SERVING, "liveness")
    router.wait_for(NOT_SERVING, "readiness")


def test_an_unknown_service_is_not_found(router: RouterProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        router.health.Check(HealthCheckRequest(service="mii.v1.Nothing"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_of_an_unknown_service_is_told_so(router: RouterProcess) -> None:
    router.wait_for(HealthCheckResponse.SERVICE_UNKNOWN, "mii.v1.Nothing")


def test_replicas_that_are_not_ready_are_named(start_router: StartRouter) -> None:
    router = start_router(enable_rest=False)
    router.control.send(control.Replicas((control.Replica(0, "127.0.0.1:1", False),)))
    deadline = time.monotonic() + 10
    while "replica 0 is not ready" not in str(error := error_of(router, request_of("a"))):
        assert time.monotonic() < deadline, error
    assert isinstance(error, Unavailable)


def test_a_dead_worker_gets_no_more_requests_until_it_is_back(
    start_router: StartRouter, worker: FakeWorker
) -> None:
    router = start_router(enable_rest=False)
    with worker_process() as (process, address):
        router.tell(address, worker)
        router.wait_for(SERVING)
        process.kill()
        process.wait()
        for _ in range(6):
            deltas_of(router, request_of("a"))
        assert len(worker.requests) == 6
    with worker_process(int(address.rpartition(":")[2])):
        worker.requests.clear()
        sent = 0
        deadline = time.monotonic() + 20
        while len(worker.requests) == sent:
            assert time.monotonic() < deadline, "the worker came back and got nothing"
            deltas_of(router, request_of("a"))
            sent += 1


def test_a_worker_that_says_it_cannot_answer_is_left_alone_until_it_can(
    start_router: StartRouter, worker: FakeWorker, worker_thread: WorkerThread
) -> None:
    router = start_router(enable_rest=False)
    router.tell(worker)
    router.wait_for(SERVING)
    worker_thread.do(lambda: worker.set_serving(False))
    call = router.inference.Generate(request_of("<gone>", stream=True), timeout=20)
    router.wait_for(NOT_SERVING)
    waiting = router.inference.Generate(request_of("a"), timeout=20)
    worker_thread.do(lambda: worker.set_serving(True))
    router.wait_for(SERVING)
    assert next(waiting).deltas[0].text == "a "
    call.cancel()


def test_a_replica_that_leaves_the_set_ends_its_requests_as_unavailable(
    start_router: StartRouter, worker: FakeWorker, worker_thread: WorkerThread
) -> None:
    router = start_router(enable_rest=False)
    router.tell(worker)
    router.wait_for(SERVING)
    call = router.inference.Generate(request_of("<hold>"), timeout=20)
    worker_thread.until(worker, lambda w: w.running == 1)
    router.tell()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(error_of_call(caught.value), Unavailable)
    worker_thread.until(worker, lambda w: w.ended["cancelled"] == 1)
