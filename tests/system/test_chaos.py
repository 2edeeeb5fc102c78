"""A short run of the chaos: see `tests.system.chaos`, and `make chaos` for the long one."""

from __future__ import annotations

from pathlib import Path

from tests.system.chaos import run_chaos


def test_no_answer_is_lost_or_wrong_while_replicas_die(cache: Path, tiny_model: Path) -> None:
    report = run_chaos(
        tiny_model, cache, seconds=15, clients=8, replicas=3, pauses=(2.0, 4.0), longest=120,
        threads=1,
    )  # fmt: skip
    assert not report.faults, "\n".join(report.lines())
    assert report.kills.total() >= 2 and report.answered.total() > 8, report.lines()
