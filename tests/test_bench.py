"""`mii bench`: draws what it says, sends it as it says, and sums up right."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.bench.load import closed_loop, open_loop
from mii.bench.report import Agreement, Distribution, is_effective, quantile, report_on
from mii.bench.targets import Measured
from mii.bench.workload import Question, Workload, arrivals
from mii.errors import InvalidArgument
from tests.router.fake_worker import FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess


def measured(first: float, gaps: list[float], *, prompt: int = 512, error: str = "") -> Measured:
    result = Measured(10.0, prompt_tokens=prompt, new_tokens=len(gaps) + 1, error=error)
    now = 10.0 + first
    result.arrivals.append(now)
    for gap in gaps:
        now += gap
        result.arrivals.append(now)
    result.ended = now
    return result


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], part: float) -> None:
    assert quantile(sorted(values), part) == pytest.approx(np.quantile(values, part), abs=1e-9)


def test_a_report_adds_up() -> None:
    results = [measured(0.1, [0.01] * 9), measured(0.3, [0.02] * 9), measured(0, [], error="gone")]
    report = report_on(results, Agreement(time_to_first_token=0.2))
    longest = 0.3 + 9 * 0.02
    assert (report.requests, report.failed, report.errors) == (3, 1, {"gone": 1})
    assert report.seconds == pytest.approx(longest)
    assert report.output_tokens_per_second == pytest.approx(20 / longest)
    assert report.good_requests_per_second == pytest.approx(1 / longest)
    first = asdict(report.time_to_first_token_ms)
    assert first == pytest.approx(asdict(Distribution.of([0.1, 0.3])))
    assert report.inter_token_latency_ms.p50 == pytest.approx(15.0)
    assert json.dumps(report.as_dict()) and "3, 1 failed" in "\n".join(report.lines())


def test_fastgens_agreement() -> None:
    assert is_effective(measured(0.9, [0.2] * 40), 4.0)
    assert not is_effective(measured(1.1, [0.2] * 40), 4.0), "the first token is late"
    assert not is_effective(measured(0.9, [0.3] * 40), 4.0), "the rate is low"
    assert is_effective(measured(0.9, [0.2, 0.2, 0.5, 0.2]), 4.0), "one gap is averaged away"
    assert is_effective(measured(0.9, [0.3] * 40), 2.0)


def test_lengths_are_drawn_as_asked_and_the_same_each_time() -> None:
    workload = Workload(500, input_tokens=200, output_tokens=50, spread=0.3, seed=3)
    questions = workload.questions()
    assert questions == workload.questions()
    assert statistics.mean(q.prompt_tokens for q in questions) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(q.new_tokens for q in questions) == pytest.approx(15, rel=0.15)
    assert all(len(q.prompt.split()) == q.prompt_tokens for q in questions)
    same = Workload(20, input_tokens=50, shared_tokens=30).questions()
    assert len({" ".join(q.prompt.split()[:30]) for q in same}) == 1
    assert len({q.prompt for q in same}) == 20
    drawn = Workload(2000, None, None).questions()
    assert 80 < statistics.median(q.prompt_tokens for q in drawn) < 125
    assert max(q.new_tokens for q in drawn) > 800


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_their_rate_and_spread(burstiness: float) -> None:
    pauses = list(islice(arrivals(5.0, burstiness, seed=1), 20_000))
    assert statistics.mean(pauses) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(pauses) == pytest.approx(0.2 / burstiness**0.5, rel=0.08)
    with pytest.raises(InvalidArgument, match="rate"):
        next(arrivals(0.0, 1.0, 0))


class Counting:
    """A server that holds each request until it is released."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.asked: list[float] = []

    async def ask(self, question: Question, measured: Measured) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.asked.append(time.perf_counter())
        await asyncio.sleep(0.001)
        self.running -= 1
        if question.new_tokens == 13:
            raise RuntimeError("unlucky")
        measured.arrivals.append(time.perf_counter())

    async def close(self) -> None: ...


async def test_a_closed_loop_never_has_more_requests_than_clients() -> None:
    target = Counting()
    questions = [Question("a", 1, n) for n in range(40)]
    results = await closed_loop(target, questions, 7)
    assert target.most == 7 and len(results) == 40
    assert [each.error for each in results if each.error] == ["RuntimeError: unlucky"]


async def test_an_open_loop_asks_when_the_time_has_come() -> None:
    target = Counting()
    questions = [Question("a", 1, 1)] * 10
    began = time.perf_counter()
    results = await open_loop(target, questions, iter([0.0, 0.02] * 5))
    assert len(results) == 10
    assert target.asked[-1] - began >= 0.08


@pytest.fixture(scope="module")
def served() -> Iterator[RouterProcess]:
    thread = WorkerThread()
    worker: FakeWorker = thread.start_worker()
    router = RouterProcess()
    router.tell(worker)
    yield router
    router.close()
    thread.do(worker.stop)
    thread.close()


@pytest.mark.parametrize("over", ["grpc", "completions", "chat"])
def test_the_command_measures_a_server(served: RouterProcess, over: str, tmp_path: Path) -> None:
    target = f"localhost:{served.port}" if over == "grpc" else served.url
    command = [sys.executable, "-m", "mii", "bench", target, "-c", "4", "-n", "12"]
    command += ["--input", "20", "--output", "5", "--json", str(tmp_path / "run.json")]
    command += ["--png", str(tmp_path / "run.png")]
    command += ["--chat"] if over == "chat" else []
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "time to first token" in ended.stdout
    facts: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    assert (facts["requests"], facts["failed"]) == (12, 0)
    assert facts["output_tokens_per_second"] * facts["seconds"] == pytest.approx(60)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "2", "-r", "3"], "--clients"),
        (["-r", "-1"], "rate"),
        (["-n", "0"], "--requests"),
        (["--input", "many"], "--input"),
    ],
)
def test_bad_arguments_are_one_line(
    served: RouterProcess, arguments: list[str], words: str
) -> None:
    command = [sys.executable, "-m", "mii", "bench", served.url, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_that_is_not_there_is_an_error() -> None:
    command = [sys.executable, "-m", "mii", "bench", "http://127.0.0.1:1", "-n", "2"]
    command += ["--warmup", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "all 2 requests failed" in ended.stderr
    assert "Connect" in ended.stdout
