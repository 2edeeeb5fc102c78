"""Timing of single kernels on a GPU, each beside its floor."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

READ = 4.39e12  # bytes a second that an H200 reads
MULTIPLY = 790e12  # bf16 operations a second
_WARM_UP = 0.02  # seconds; after a pause an H200 reads an eighth slower at first

Launch = Callable[[], object]


def time_graph(launches: Sequence[Launch], repeats: int = 7) -> float:
    """Return microseconds of one launch: the median of several replays of a graph of all.

    Args:
        launches: over buffers that together do not fit in the second-level cache.
        repeats: replays.
    """
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times)[len(times) // 2]


@dataclass
class Measurements:
    """What was measured so far.

    Args:
        only_compile: launch each kernel once and measure nothing, to fill Triton's cache.
    """

    only_compile: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def time(
        self,
        kernel: str,
        case: str,
        launches: Sequence[Launch],
        *,
        bytes_read: float = 0.0,
        operations: float = 0.0,
        settings: dict[str, Any] | str | None = None,
    ) -> None:
        """Time a kernel; one that fails is reported and costs the others nothing.

        Args:
            kernel, case: what, and on what.
            launches: see `time_graph`.
            bytes_read, operations: what one launch must move and compute.
            settings: what may be tuned.
        """
        try:
            if self.only_compile:
                launches[0]()
                torch.cuda.synchronize()
                return
            microseconds = time_graph(launches)
        except Exception:
            print(f"{kernel}, {case}, {settings}: FAILED")
            traceback.print_exc()
            return
        floor = max(bytes_read / READ, operations / MULTIPLY) * 1e6
        self.rows.append(
            {
                "kernel": kernel,
                "case": case,
                "settings": settings,
                "us": round(microseconds, 2),
                "floor_us": round(floor, 2),
            }
        )

    def show(self, kernel: str, best: int = 2) -> None:
        """Print the best settings of each case of a kernel, and the worst."""
        cases = dict.fromkeys(row["case"] for row in self.rows if row["kernel"] == kernel)
        for case in cases:
            rows = [r for r in self.rows if r["kernel"] == kernel and r["case"] == case]
            rows.sort(key=lambda row: row["us"])
            for row in rows if len(rows) <= best + 1 else [*rows[:best], rows[-1]]:
                share = f"{row['floor_us'] / row['us']:5.0%}" if row["floor_us"] else "     "
                print(
                    f"{kernel:10s} {case:34s} {row['us']:9.2f} us  floor {row['floor_us']:8.2f} "
                    f"{share}  {row['settings'] or ''}",
                    flush=True,
                )

    def tuned(self) -> dict[str, dict[str, Any]]:
        """Return the best settings of each case that has several."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["settings"] is not None:
                cases = found.setdefault(row["kernel"], {})
                best = cases.setdefault(row["case"], row)
                if row["us"] < best["us"]:
                    cases[row["case"]] = row
        return {
            kernel: {case: row["settings"] for case, row in cases.items()}
            for kernel, cases in found.items()
        }
