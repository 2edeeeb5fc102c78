"""What the router counts, and how it is shown."""

from __future__ import annotations

import math
from collections import defaultdict

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from mii import control
from mii.keys import digest_of
from mii.proto.inference_pb2 import GenerateRequest, Prompt, SamplingParams
from mii.router.metrics import Histogram, ReplicaHistory
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.http_calls import call, get, post
from tests.router.router_process import RouterProcess
from tests.router.test_failover import take

BOUNDS = [0.001, 0.25, 1.0, 7.5]


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.001, 0.0011, 0.25, 3, 7.5, 8, 1e9]), st.integers(1, 4))
    )
)
def test_a_histogram_counts_as_prometheus_own(values: list[tuple[float, int]]) -> None:
    ours = Histogram(BOUNDS)
    theirs = TheirHistogram("x", "x", buckets=BOUNDS, registry=CollectorRegistry())
    for value, times in values:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    (family,) = theirs.collect()
    samples = [sample for sample in family.samples if sample.name != "x_created"]
    buckets = [(s.labels["le"], s.value) for s in samples if s.name == "x_bucket"]
    assert ours.cumulative() == buckets
    total = next(sample.value for sample in samples if sample.name == "x_sum")
    assert math.isclose(ours.sum, total)


def told(*ready: bool | None) -> control.Replicas:
    """The supervisor's word: for each replica whether it is ready; None: it is not there."""
    replicas = (
        control.Replica(number, "a:1" if each else "", each)
        for number, each in enumerate(ready)
        if each is not None
    )
    return control.Replicas(tuple(replicas))


def test_a_restart_is_a_replica_that_serves_again() -> None:
    history = ReplicaHistory()
    for message in (told(False, False), told(True, True), control.Died(0, "a:1", ())):
        history.take(message)
    assert history.deaths == {0: 1} and not history.restarts
    for message in (told(False, True), told(False, True), told(True, True)):
        history.take(message)
    assert history.restarts == {0: 1}
    for message in (told(True, False), told(True, True)):  # as it was told to
        history.take(message)
    assert history.deaths == {0: 1} and history.restarts == {0: 1, 1: 1}


def test_a_replica_that_is_added_again_has_not_been_restarted() -> None:
    history = ReplicaHistory()
    for message in (told(True, True), told(True, False), told(True, None), told(True, True)):
        history.take(message)
    assert not history.restarts and history.ready == {0: True, 1: True}


class Figures:
    """What /metrics says."""

    def __init__(self, router: RouterProcess, **headers: str) -> None:
        answer = call(router, "GET", "/metrics", headers=headers)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        self.samples: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)  # by labels
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                labels = sorted(v for k, v in sample.labels.items() if k != "model_name")
                self.samples[sample.name][tuple(labels)] = sample.value

    def __call__(self, name: str, *labels: str) -> float:
        return self.samples[f"mii:{name}"].get(tuple(sorted(labels)), 0.0)


@pytest.fixture
def fresh(start_router: StartRouter, workers: list[FakeWorker]) -> RouterProcess:
    """A router that has counted nothing, in front of two workers."""
    router = start_router()
    router.tell(*workers)
    router.wait_for(1)
    return router


def request_of(words: str, **fields: object) -> GenerateRequest:
    return GenerateRequest(prompts=[Prompt(text=words)], **fields)  # type: ignore[arg-type]


def test_figures_agree_with_what_was_asked(fresh: RouterProcess) -> None:
    for _ in range(3):
        assert post(fresh, "/v1/completions", {"prompt": "a b c", "stream": True}).status == 200
    assert post(fresh, "/generate", {"prompts": ["a b", "c d e f"], "n": 2}).status == 200
    assert post(fresh, "/generate", {"prompts": []}).status == 400
    assert get(fresh, "/nothing/here").status == 404
    call = fresh.inference.Generate(request_of("a b", stream=True))
    assert sum(len(message.deltas) for message in call) == 2
    figures = Figures(fresh)
    assert figures("requests_total", "http", "ok") == 4
    assert figures("requests_total", "grpc", "ok") == 1
    assert figures("requests_total", "http", "invalid_argument") == 1
    assert figures("requests_total", "http", "not_found") == 1
    assert figures.samples["mii:requests_refused_total"] == {
        ("invalid_argument",): 1,
        ("overloaded",): 0,
    }
    tokens = 3 * 3 + 2 * (2 + 4) + 2
    assert figures("generation_tokens_total") == tokens
    assert figures("prompt_tokens_total") == 3 * 3 + (2 + 4) + 2
    answers = 3 + 4 + 1
    assert figures("inter_token_latency_seconds_count") == tokens - answers
    assert figures("request_generation_tokens_count") == 5
    assert figures("request_generation_tokens_sum") == tokens
    assert figures("request_generation_tokens_bucket", "2.0") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert figures(f"{name}_seconds_count") == 5
    assert figures("requests_in_progress") == figures("total_queued_requests") == 0


def test_what_is_under_way_is_seen(fresh: RouterProcess) -> None:
    calls = [fresh.inference.Generate(request_of("a <hold> b", stream=True)) for _ in range(3)]
    for each in calls:
        next(each)
    figures = Figures(fresh)
    assert figures("requests_in_progress") == 3
    outstanding = figures.samples["mii:replica_outstanding_prompts"]
    assert sum(outstanding.values()) == 3 and len(outstanding) == 2
    assert figures("generation_tokens_total") == 3
    assert figures.samples["mii:replica_up"] == {("0",): 1, ("1",): 1}
    for each in calls:
        each.cancel()
    while (figures := Figures(fresh))("requests_in_progress") > 0:
        pass
    assert figures("requests_total", "grpc", "cancelled") == 3
    assert not any(figures.samples["mii:replica_outstanding_prompts"].values())


def test_a_request_that_waits_for_a_replica_is_queued(start_router: StartRouter) -> None:
    router = start_router()
    router.control.send(control.Replicas((control.Replica(0, "", False, returning=True),)))
    calls = [router.inference.Generate(request_of("a")) for _ in range(2)]
    while (figures := Figures(router))("requests_in_progress") < 2:
        pass
    assert figures("total_queued_requests") == 2
    assert figures("replica_up", "0") == 0
    for each in calls:
        each.cancel()
    while Figures(router)("total_queued_requests") > 0:
        pass


def test_a_prompt_that_is_moved_is_a_failover_and_is_counted_once(
    start_router: StartRouter, worker_thread: WorkerThread
) -> None:
    first, second = worker_thread.start_worker(), worker_thread.start_worker()
    router = start_router()
    router.tell(first, second)
    router.wait_for(1)
    stream = router.inference.Generate(request_of("a b <hold> c", stream=True), timeout=20)
    take(stream, 2)
    router.control.send(control.Died(0, first.address, ()))
    worker_thread.do(first.stop)
    worker_thread.do(second.release.set)
    list(stream)
    figures = Figures(router)
    assert figures.samples["mii:failovers_total"] == {("0",): 1, ("1",): 0}
    assert figures("replica_deaths_total", "0") == 1
    assert figures("generation_tokens_total") == 4
    assert figures("inter_token_latency_seconds_count") == 3
    worker_thread.do(second.stop)


def test_too_many_requests_are_refused_and_counted(
    start_router: StartRouter, workers: list[FakeWorker]
) -> None:
    router = start_router(max_requests=1)
    router.tell(*workers)
    router.wait_for(1)
    stream = router.inference.Generate(request_of("a <hold> b", stream=True))
    next(stream)
    assert post(router, "/generate", {"prompts": "a"}).status == 429
    stream.cancel()
    figures = Figures(router)
    assert figures("requests_refused_total", "overloaded") == 1
    assert figures("requests_total", "http", "overloaded") == 1


def test_calls_without_a_key_are_refused_and_counted(
    start_router: StartRouter, workers: list[FakeWorker]
) -> None:
    router = start_router(api_keys=(digest_of("key-of-some-user"),))
    router.tell(*workers)
    router.wait_for(1)
    assert get(router, "/metrics").status == 401
    assert post(router, "/generate", {"prompts": "a"}).status == 401
    with pytest.raises(grpc.RpcError):
        list(router.inference.Generate(request_of("a")))
    figures = Figures(router, Authorization="Bearer key-of-some-user")
    assert figures("requests_refused_total", "unauthenticated") == 2
    assert figures("requests_total", "http", "unauthenticated") == 1
    assert figures("requests_total", "grpc", "unauthenticated") == 1


def test_an_error_in_the_middle_of_a_stream_is_the_requests_outcome(fresh: RouterProcess) -> None:
    answer = post(fresh, "/v1/completions", {"prompt": "a b <bug> c", "stream": True})
    assert answer.status == 200 and "error" in answer.events[-1]
    assert Figures(fresh)("requests_total", "http", "internal_error") == 1


def test_open_metrics_are_to_be_had(fresh: RouterProcess) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = call(fresh, "GET", "/metrics", headers=accept)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    families = {family.name for family in open_metrics(answer.body.decode())}
    assert {"mii:requests", "mii:time_to_first_token_seconds", "mii:replica_up"} <= families


def test_parameters_that_are_wrong_are_no_generation(fresh: RouterProcess) -> None:
    with pytest.raises(grpc.RpcError):
        list(fresh.inference.Generate(request_of("a", sampling=SamplingParams(temperature=-1))))
    figures = Figures(fresh)
    assert figures("requests_total", "grpc", "invalid_argument") == 1
    assert figures("e2e_request_latency_seconds_count") == 0
