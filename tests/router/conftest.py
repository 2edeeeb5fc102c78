"""Routers in front of fake workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess

StartRouter = Callable[..., RouterProcess]


@pytest.fixture(scope="session")
def worker_thread() -> Iterator[WorkerThread]:
    thread = WorkerThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def shared_workers(worker_thread: WorkerThread) -> Iterator[list[FakeWorker]]:
    workers = [worker_thread.start_worker() for _ in range(2)]
    yield workers
    for worker in workers:
        worker_thread.do(worker.stop)


@pytest.fixture
def workers(shared_workers: list[FakeWorker], worker_thread: WorkerThread) -> list[FakeWorker]:
    """The two workers behind `router`, as if new."""
    for worker in shared_workers:
        worker.requests.clear()
        worker.deadlines.clear()
        worker.ended.clear()
        worker_thread.do(worker.release.clear)
    return shared_workers


@pytest.fixture(scope="session")
def router(shared_workers: list[FakeWorker]) -> Iterator[RouterProcess]:
    """A router in front of two workers, for tests that leave both as they are."""
    router = RouterProcess()
    router.tell(*shared_workers)
    router.wait_for(HealthCheckResponse.SERVING)
    yield router
    router.close()


@pytest.fixture
def start_router() -> Iterator[StartRouter]:
    """Starts routers of a test's own."""
    routers: list[RouterProcess] = []

    def start(**config: object) -> RouterProcess:
        routers.append(RouterProcess(**config))
        return routers[-1]

    yield start
    for router in routers:
        router.close()
