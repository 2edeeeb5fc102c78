"""Requests that a client sends again: what it has is not asked of the workers any more."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from mii.errors import InvalidArgument
from mii.proto.inference_pb2 import PartialAnswer
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess
from tests.router.test_failover import take, text, tokens
from tests.router.test_inference import deltas_of, error_of, request_of


@pytest.fixture
def two(worker_thread: WorkerThread) -> Iterator[list[FakeWorker]]:
    """Workers of the test's own."""
    workers = [worker_thread.start_worker() for _ in range(2)]
    yield workers
    for worker in workers:
        worker_thread.do(worker.release.set)
        worker_thread.do(worker.stop)


def test_only_what_a_client_misses_is_asked_for_under_the_same_ids_and_seeds(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    request = request_of("a b", "c d e", "f g", n=2)
    request.request_id = "again"
    request.seeds.extend([11, 12, 13])
    request.resume.extend(
        [
            PartialAnswer(prompt_index=1, choice_index=1),
            PartialAnswer(prompt_index=2, choice_index=0),
            PartialAnswer(prompt_index=2, choice_index=1),
        ]
    )
    deltas = deltas_of(router, request)
    assert {(d.prompt_index, d.choice_index): d.text for d in deltas} == {
        (1, 1): "c/1 d/1 e/1 ",
        (2, 0): "f g ",
        (2, 1): "f/1 g/1 ",
    }
    asked = [each for worker in workers for each in worker.requests]
    assert {each.request_id: each.sampling.seed for each in asked} == {"again-1": 12, "again-2": 13}


def test_a_stream_goes_on_after_the_clients_tokens_also_when_it_moves(
    start_router: StartRouter, two: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second = two
    router = start_router(enable_rest=False)
    router.tell(*two)
    router.wait_for(HealthCheckResponse.SERVING)
    request = request_of("a b c <hold> d", stream=True, seed="5")
    request.resume.append(PartialAnswer(token_ids=[0, 1]))
    call = router.inference.Generate(request, timeout=20)
    deltas = take(call, 1)
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    deltas += [delta for message in call for delta in message.deltas]
    assert text(deltas) == "c <hold> d " and tokens(deltas) == [2, 3, 4]
    assert [list(each.token_ids) for each in second.requests[-1].resume] == [[0, 1, 2]]


def test_what_is_not_clear_is_refused(router: RouterProcess, workers: list[FakeWorker]) -> None:
    request = request_of("a", "b", seed="5")
    request.resume.append(PartialAnswer(prompt_index=2))
    assert isinstance(error_of(router, request), InvalidArgument)
    assert not any(worker.requests for worker in workers)


def test_what_a_replica_holds_is_asked_of_that_one(
    start_router: StartRouter, two: list[FakeWorker]
) -> None:
    first, second = two
    second.held = {"again-0", "again-1", "again-3"}
    router = start_router(enable_rest=False)
    router.tell(*two)
    router.wait_for(HealthCheckResponse.SERVING)
    request = request_of("a", "b", "c", "d", seed="5")
    request.request_id, request.attempt = "again", 2
    assert len(deltas_of(router, request)) == 4
    assert {each.request_id for each in second.requests} >= second.held
    assert {each.attempt for each in [*first.requests, *second.requests]} == {2}
    request.attempt = 1  # a new one: nobody is asked, and both are used
    assert len(deltas_of(router, request)) == 4
    assert len(first.requests) >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_router_that_ends_are_to_be_sent_again(
    stream: bool, start_router: StartRouter, two: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    router = start_router(enable_rest=False)
    router.tell(two[0])
    router.wait_for(HealthCheckResponse.SERVING)
    call = router.inference.Generate(request_of("a <hold> b", stream=stream), timeout=20)
    worker_thread.until(two[0], lambda worker: worker.running == 1)
    router.process.terminate()
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert "send the request again" in str(call.details())
    assert router.process.wait(10) == 0
