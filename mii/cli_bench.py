"""`mii bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mii.api import client as client_by_name
from mii.async_client import AsyncMIIClient
from mii.bench.load import closed_loop, open_loop
from mii.bench.plot import draw
from mii.bench.report import Agreement, report_on
from mii.bench.targets import GrpcTarget, Measured, OpenAITarget, Target
from mii.bench.workload import Question, Workload, arrivals
from mii.errors import InvalidArgument, ServiceError
from mii.keys import KEY_VARIABLE

_SHAREGPT = "sharegpt"


def bench(parsed: argparse.Namespace) -> int:
    """Put load on a server, and print what came of it."""
    if parsed.rate is None and parsed.clients is None:
        parsed.clients = 16
    if (parsed.rate is None) == (parsed.clients is None):
        raise InvalidArgument("give --clients (a closed loop) or --rate (an open one)", "rate")
    workload = Workload(
        requests=_positive("--requests", parsed.requests),
        input_tokens=_length("--input", parsed.input),
        output_tokens=_length("--output", parsed.output),
        spread=parsed.spread,
        shared_tokens=parsed.shared,
        seed=parsed.seed,
    )
    agreement = Agreement(parsed.sla_ttft, parsed.sla_itl, parsed.sla_e2e)
    results = asyncio.run(_run(parsed, workload.questions()))
    report = report_on(results, agreement)
    print("\n".join(report.lines()))
    if parsed.json:
        facts = {"target": parsed.target, "workload": asdict(workload), **report.as_dict()}
        Path(parsed.json).write_text(json.dumps(facts, indent=1) + "\n")
    if parsed.png:
        draw(results, Path(parsed.png), f"{parsed.target}: {len(results)} requests")
    if report.failed == report.requests:
        raise ServiceError(f"all {report.requests} requests failed")
    return 0


async def _run(parsed: argparse.Namespace, questions: Sequence[Question]) -> list[Measured]:
    target = _target(parsed)
    try:
        for question in questions[: parsed.warmup]:
            await target.ask(question, Measured(time.perf_counter()))
        shown = _Counter(len(questions))
        if parsed.rate is not None:
            pauses = arrivals(parsed.rate, parsed.burstiness, parsed.seed)
            return await open_loop(target, questions, pauses, shown)
        clients = _positive("--clients", parsed.clients)
        return await closed_loop(target, questions, clients, shown)
    finally:
        await target.close()


def _target(parsed: argparse.Namespace) -> Target:
    if parsed.target.startswith(("http://", "https://")):
        key = os.environ.get(KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY")
        return OpenAITarget(parsed.target, parsed.model, chat=parsed.chat, key=key)
    known = client_by_name(parsed.target)
    return GrpcTarget(AsyncMIIClient(known.address, **asdict(known.security)))


class _Counter:
    """Shows how many requests have ended, on a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0

    def __call__(self, measured: Measured) -> None:
        self._ended += 1
        if sys.stderr.isatty():
            end = "\n" if self._ended == self._total else ""
            print(f"\r{self._ended} of {self._total} requests", end=end, file=sys.stderr)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidArgument.of(name, value, "1 or more")
    return value


def _length(name: str, text: str) -> int | None:
    if text == _SHAREGPT:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise InvalidArgument.of(name, text, f"a number of tokens, or {_SHAREGPT}")
    return int(text)
