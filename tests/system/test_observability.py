"""What a deployment tells of itself: logs, metrics and traces, all of one real one."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import mii
from mii import MIIClient
from mii.registry import DeploymentRecord, Registry
from tests.system.otlp_receiver import SECONDS, OtlpReceiver, ReceivedSpan

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "mii.json"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def served(cache: Path, tiny_model: Path, collector: OtlpReceiver) -> Iterator[MIIClient]:
    """Two replicas that log JSON and send their traces to the collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        client = mii.serve(
            tiny_model,
            replica_num=2,
            port=0,
            enable_rest=True,
            rest_port=0,
            num_blocks=64,
            threads=1,
            log_format="json",
        )
    yield client
    client.terminate_server()


@pytest.fixture(scope="module")
def record(cache: Path, served: MIIClient) -> DeploymentRecord:
    return Registry(cache).get("tiny-mii-deployment")


def post(record: DeploymentRecord, body: dict[str, Any], **headers: str) -> Any:
    """Ask for a completion over HTTP; return the answer, or the events of a stream."""
    request = urllib.request.Request(
        f"http://{record.rest_address}/v1/completions",
        json.dumps({"model": "default", "temperature": 0, "ignore_eos": True, **body}).encode(),
        {
            "Content-Type": "application/json",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def figures_of(record: DeploymentRecord) -> dict[str, dict[tuple[str, ...], float]]:
    """What /metrics says: values by name, and by labels but the model's name, sorted."""
    figures: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    with urllib.request.urlopen(f"http://{record.rest_address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            figures[sample.name][tuple(sorted(labels.values()))] = sample.value
    return figures


def lines_of(cache: Path, process: str) -> list[dict[str, Any]]:
    """What a process has logged: each line an object."""
    log = Registry(cache).logs("tiny-mii-deployment") / f"{process}.log"
    return [json.loads(line) for line in log.read_text().splitlines()]


def lines_about(cache: Path, process: str, request_id: str, last: str) -> list[dict[str, Any]]:
    """What a process has logged of a request, once its last line is there."""
    deadline = time.monotonic() + SECONDS
    while True:
        told = [each for each in lines_of(cache, process) if each.get("request_id") == request_id]
        if told and told[-1]["message"] == last:
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


def test_figures_agree_with_the_load_that_was_put_on(
    served: MIIClient, record: DeploymentRecord
) -> None:
    before = figures_of(record)
    prompts = ["a" * 70, "b" * 40, "a" * 70]
    usages = [post(record, {"prompt": each, "max_tokens": 9})["usage"] for each in prompts]
    for stream in (True, False):
        served("c" * 33, max_new_tokens=20, ignore_eos=True, temperature=0)
        post(record, {"prompt": ["d", "ee"], "n": 3, "max_tokens": 5, "stream": stream})
    after = figures_of(record)

    def grown(name: str, *labels: str) -> float:
        if not labels:
            return sum(after[name].values()) - sum(before[name].values())
        return after[name][labels] - before[name].get(labels, 0.0)

    prompt_tokens = 70 + 40 + 70 + 2 * (33 + 3)
    tokens = 3 * 9 + 2 * (20 + 2 * 3 * 5)
    answers = 3 + 2 * (1 + 6)
    assert sum(usage["prompt_tokens"] for usage in usages) == 180
    assert grown("mii:requests_total", "http", "ok") == 5
    assert grown("mii:requests_total", "grpc", "ok") == 2
    assert grown("mii:prompt_tokens_total") == prompt_tokens
    assert grown("mii:generation_tokens_total") == tokens
    assert grown("mii:engine_generation_tokens_total") == tokens
    assert grown("mii:inter_token_latency_seconds_count") == tokens - answers
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown(f"mii:{name}_seconds_count") == 7
    first, whole = (
        f"mii:{name}_seconds_sum" for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert 0 < grown("mii:request_queue_time_seconds_sum") < grown(first) < grown(whole)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown("mii:prefix_cache_hit_tokens_total") >= hits
    assert after["mii:kv_cache_blocks"] == {("0",): 64, ("1",): 64}
    assert after["mii:replica_up"] == {("0",): 1, ("1",): 1}
    assert sum(after["mii:num_requests_running"].values()) == 0


def test_the_inference_gateway_finds_what_it_asks_for(record: DeploymentRecord) -> None:
    figures = figures_of(record)
    for name in ("total_queued_requests", "total_running_requests", "kv_cache_utilization"):
        assert figures[f"mii:{name}"] == {(): 0.0}, "one series, for all replicas"
    ((labels, value),) = figures["mii:cache_config_info"].items()
    assert value == 1 and "128" in labels
    assert list(figures["mii:lora_requests_info"]) == [("", "", "0")]


def test_every_metric_of_the_dashboard_is_there(record: DeploymentRecord) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 30
    named = {
        name
        for expression in expressions
        for name in re.findall(r"(mii:\w+|process_\w+)", expression)
    }
    assert named <= figures_of(record).keys()
    labels = {name for each in expressions for name in re.findall(r"by \((\w+)\)", each)}
    assert labels == {"le", "outcome", "surface", "replica", "reason"}


def test_a_clients_request_id_is_in_the_lines_of_router_and_worker(
    served: MIIClient, record: DeploymentRecord, cache: Path
) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "stream": True}
    post(record, body, x_request_id="order-66")
    (router,) = lines_about(cache, "router", "order-66", "request")
    assert router["logger"] == "mii.access" and router["process"] == "router"
    told = {
        "surface": "http",
        "method": "POST /v1/completions",
        "status": "200",
        "outcome": "ok",
        "prompt_tokens": 3,
        "generated_tokens": 4,
        "moves": 0,
    }
    assert router | told == router
    times = [router[f"{name}_seconds"] for name in ("queue", "time_to_first_token", "total")]
    assert 0 < times[0] <= times[1] <= times[2] < 60
    number = router["replicas"]
    (worker,) = lines_about(cache, f"worker-{number}-0", "order-66", "answer")
    assert worker["process"] == f"worker {number}.0"
    assert worker["generated_tokens"] == 4 and worker["finish_reason"] == "length"


def test_every_line_of_every_process_is_an_object(
    served: MIIClient, record: DeploymentRecord, cache: Path
) -> None:
    with pytest.raises(urllib.error.HTTPError):
        post(record, {"prompt": "a\nb", "temperature": "hot\n{}"}, x_request_id="order-67")
    for process in ("supervisor", "router", "worker-0-0", "worker-1-0"):
        lines = lines_of(cache, process)
        assert lines
        for line in lines:
            assert line["process"] == process.replace("worker-", "worker ").replace("-", ".")
            assert line["level"] in ("info", "warning", "error") and line["message"]
    (refused,) = lines_about(cache, "router", "order-67", "request")
    assert refused["outcome"] == "invalid_argument"


def test_a_request_that_is_moved_says_so_in_log_and_figures(
    record: DeploymentRecord, cache: Path
) -> None:
    body = {"prompt": "abc", "max_tokens": 480, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"http://{record.rest_address}/v1/completions",
        json.dumps({"model": "default", "ignore_eos": True, **body}).encode(),
        {"x-request-id": "order-69", "x-mii-explain-route": "1"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        number = int(re.findall(r"replica (\d+)", answer.headers["x-mii-route"])[0])
        answer.readline()
        (pid,) = [
            each.pid
            for each in Registry(cache).get("tiny-mii-deployment").processes
            if each.role == "worker" and each.replica == number
        ]
        os.kill(pid, signal.SIGKILL)
        assert answer.read().endswith(b"[DONE]\n\n")
    told = lines_about(cache, "router", "order-69", "request")
    ended = told[-1]
    (moved,) = [line["message"] for line in told if "moved" in line["message"]]
    assert f"moved away from replica {number}" in moved
    assert (ended["outcome"], ended["moves"], ended["generated_tokens"]) == ("ok", 1, 480)
    assert ended["replicas"] == f"{number},{1 - number}"
    deadline = time.monotonic() + SECONDS
    while (figures := figures_of(record))["mii:replica_restarts_total"][str(number),] == 0:
        assert time.monotonic() < deadline
    for name in ("mii:failovers_total", "mii:replica_deaths_total", "mii:replica_restarts_total"):
        assert figures[name] == {(str(number),): 1, (str(1 - number),): 0}


def test_a_trace_goes_through_router_and_worker(
    record: DeploymentRecord, collector: OtlpReceiver
) -> None:
    body = {"prompt": "a" * 50, "max_tokens": 6}
    post(record, body, traceparent=f"00-{TRACE}-{SPAN}-01", x_request_id="order-68")

    def of_trace(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
        return {span.name: span for span in spans if span.trace_id == TRACE}

    spans = of_trace(collector.until(lambda spans: len(of_trace(spans)) == 6))
    request, attempt = spans["POST /v1/completions"], spans["attempt"]
    call = spans["/mii.v1.Inference/Generate"]
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert [request.parent_id, attempt.parent_id, call.parent_id] == [
        SPAN,
        request.span_id,
        attempt.span_id,
    ]
    assert {phase.parent_id for phase in phases} == {call.span_id}
    assert (request.service, request.instance) == ("mii-router", "router")
    replica = attempt.attributes["mii.replica"]
    assert (call.service, call.instance) == ("mii-worker", f"worker {replica}.0")
    expected = {
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 6,
        "mii.request_id": "order-68",
        "mii.outcome": "ok",
    }
    assert request.attributes | expected == request.attributes
    assert phases[1].attributes["gen_ai.usage.input_tokens"] == 50
    assert phases[2].attributes["gen_ai.usage.output_tokens"] == 6
    for earlier, later in zip(phases, phases[1:], strict=False):
        assert earlier.began <= earlier.ended <= later.began + 1000 and later.ended >= later.began
    assert request.began <= phases[0].began and phases[-1].ended <= request.ended
    assert not request.failed


def test_a_grpc_call_has_a_trace_of_its_own_and_says_why_it_failed(
    served: MIIClient, collector: OtlpReceiver
) -> None:
    with pytest.raises(mii.errors.InvalidArgument):
        served("a" * 600, max_new_tokens=4)
    name = "/mii.v1.Inference/Generate"
    spans = collector.until(
        lambda spans: any(s.failed and s.instance == "router" and s.name == name for s in spans)
    )
    failed = next(s for s in spans if s.failed and s.instance == "router" and s.name == name)
    assert not failed.parent_id and failed.trace_id != TRACE
    assert failed.attributes["mii.outcome"] == "context_length_exceeded"
    assert failed.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
