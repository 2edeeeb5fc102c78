"""Requests whose replica dies: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from mii import control
from mii.errors import InternalError, Leaving, Unavailable
from mii.proto.inference_pb2 import SequenceDelta
from mii.router.balancer import RoundRobin
from mii.router.replicas import Replicas
from mii.router.submission import ChoiceState, Submission
from mii.status import error_of_call
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess
from tests.router.test_inference import error_of, request_of

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.fixture
def three(worker_thread: WorkerThread) -> Iterator[list[FakeWorker]]:
    """Workers of the test's own."""
    workers = [worker_thread.start_worker() for _ in range(3)]
    yield workers
    for worker in workers:
        worker_thread.do(worker.release.set)
        worker_thread.do(worker.stop)


def begin(router: RouterProcess, *workers: FakeWorker) -> None:
    router.tell(*workers)
    router.wait_for(SERVING)


def take(call: Any, count: int) -> list[SequenceDelta]:
    """Read until so many tokens have come; some may come together."""
    deltas: list[SequenceDelta] = []
    while sum(len(delta.token_ids) for delta in deltas) < count:
        deltas.extend(next(call).deltas)
    return deltas


def tokens(deltas: list[SequenceDelta], choice: int = 0) -> list[int]:
    return [i for delta in deltas if delta.choice_index == choice for i in delta.token_ids]


def text(deltas: list[SequenceDelta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice_index == choice)


def test_a_stream_goes_on_at_another_replica_after_what_has_come(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second, _ = three
    router = start_router(enable_rest=False)
    begin(router, first, second)
    request = request_of("a b <hold> c", return_full_text=True, stream=True)
    call = router.inference.Generate(request, timeout=20)
    deltas = take(call, 2)
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    deltas += [delta for message in call for delta in message.deltas]
    assert text(deltas) == "a b <hold> c|a b <hold> c "
    assert tokens(deltas) == [0, 1, 2, 3]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    asked = second.requests[-1]
    assert [(part.choice_index, list(part.token_ids)) for part in asked.resume] == [(0, [0, 1])]
    assert asked.sampling == first.requests[-1].sampling, "the same seed, the same parameters"


def test_an_answer_that_is_not_streamed_is_whole_in_the_end(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second, _ = three
    router = start_router(enable_rest=False)
    begin(router, first, second)
    call = router.inference.Generate(request_of("a <hold> b", stream=False, n=2), timeout=20)
    worker_thread.until(first, lambda worker: worker.running == 1)
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    deltas = [delta for message in call for delta in message.deltas]
    assert sorted(delta.text for delta in deltas) == ["a <hold> b ", "a/1 <hold>/1 b/1 "]


def test_answers_that_have_ended_are_not_begun_again(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second, _ = three
    router = start_router(enable_rest=False)
    begin(router, first, second)
    call = router.inference.Generate(request_of("a b <hold-second>", n=2, stream=True), timeout=20)
    deltas = take(call, 5)  # all of choice 0, two tokens of choice 1
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    deltas += [delta for message in call for delta in message.deltas]
    assert [text(deltas, 0), text(deltas, 1)] == [
        "a b <hold-second> ",
        "a/1 b/1 <hold-second>/1 ",
    ]
    assert [part.choice_index for part in second.requests[-1].resume] == [1]


def test_a_lone_replica_that_comes_back_goes_on_where_it_was(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second, _ = three
    router = start_router(enable_rest=False)
    begin(router, first)
    call = router.inference.Generate(request_of("a <hold> b", stream=True), timeout=20)
    deltas = take(call, 1)
    worker_thread.do(first.stop)
    router.wait_for(NOT_SERVING)
    router.control.send(control.Replicas((control.Replica(0, "", False, returning=True),)))
    worker_thread.do(second.release.set)
    router.tell(second)
    deltas += [delta for message in call for delta in message.deltas]
    assert text(deltas) == "a <hold> b "


def test_nobody_waits_for_a_replica_that_will_not_come_back(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    router = start_router(enable_rest=False)
    begin(router, three[0])
    call = router.inference.Generate(request_of("a <hold> b", stream=True), timeout=20)
    next(call)
    worker_thread.do(three[0].stop)
    router.wait_for(NOT_SERVING)
    router.control.send(control.Replicas(()))
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(error_of_call(caught.value), Unavailable)


def test_a_request_that_two_replicas_in_a_row_die_of_is_sent_to_no_third(
    start_router: StartRouter, three: list[FakeWorker]
) -> None:
    router = start_router(enable_rest=False)
    begin(router, *three)
    error = error_of(router, request_of("<gone>", stream=True))
    assert isinstance(error, InternalError)
    assert "replica after replica has died" in str(error)
    assert [len(worker.requests) for worker in three] == [1, 1, 0]


def test_a_request_that_moves_on_between_deaths_is_not_to_blame(
    start_router: StartRouter, three: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    first, second, third = three
    router = start_router(enable_rest=False)
    begin(router, *three)
    call = router.inference.Generate(
        request_of("a <hold> b <hold-again> c", stream=True), timeout=20
    )
    deltas = take(call, 1)
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    deltas += take(call, 2)
    worker_thread.do(second.stop)
    worker_thread.do(third.release_again.set)
    deltas += [delta for message in call for delta in message.deltas]
    assert text(deltas) == "a <hold> b <hold-again> c "


@pytest.mark.parametrize(
    ("death", "blame"),
    [
        (control.Died(0, "a:1", ("id-6",)), 0.0),
        (control.Died(0, "a:1", ("id-6", "id-7")), 1.0),
        (control.Died(0, "a:1", ("id-7",), by_itself=False), 0.5),
    ],
)
async def test_the_supervisor_knows_what_a_replica_died_of(
    death: control.Died, blame: float
) -> None:
    replicas = Replicas(lambda address: SilentTransport(), RoundRobin(), lambda: None)
    replicas.update([control.Replica(0, "a:1", True)])
    replica = replicas.any()
    asking = asyncio.ensure_future(replicas.blame(replica, "id-7"))
    await asyncio.sleep(0)
    replicas.died(control.Died(0, "another:1", ("id-7",)))  # an earlier life of replica 0
    replicas.died(death)
    assert await asking == blame
    await replicas.close()


def test_only_a_request_that_was_computed_is_to_blame() -> None:
    submission = Submission(request_of("a"), 0, [ChoiceState()])
    gone = Unavailable("gone")
    for replica in range(5):
        submission.next_request()
        assert not submission.is_suspect(gone), "not yet accepted"
        submission.accept()
        assert submission.is_suspect(gone) and not submission.is_suspect(Leaving("bye"))
        submission.lose(replica, gone, blame=0.0)
    for blame in (0.5, 0.5, 0.5):
        submission.lose(5, gone, blame)
    with pytest.raises(InternalError, match="replica 6"):
        submission.lose(6, gone, blame=0.5)


class SilentTransport:
    """A worker that is never asked anything."""

    async def close(self) -> None:
        return None

    generate = tokenize = detokenize = list_models = status = healthy = close
