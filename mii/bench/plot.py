"""A picture of a run: how its latencies are distributed, and what came when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mii.bench.targets import Measured
from mii.errors import InvalidArgument


def draw(results: Sequence[Measured], path: Path, title: str) -> None:
    """Write a PNG.

    Args:
        results: of a run.
        path: of the file.
        title: above the picture.

    Raises:
        InvalidArgument: without matplotlib, or if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("--png needs matplotlib: pip install 'mii[bench]'", "png") from None
    good = [each for each in results if not each.error]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    for axis, name, seconds in (
        (axes[0][0], "time to first token", [each.time_to_first_token for each in good]),
        (axes[0][1], "between tokens", [gap for each in good for gap in each.gaps]),
        (axes[1][0], "whole answer", [each.ended - each.began for each in good]),
    ):
        values = sorted(1e3 * each for each in seconds)
        shares = [(index + 1) / len(values) for index in range(len(values))]
        axis.step(values, shares, where="post")
        axis.set(xlabel=f"{name}, ms", ylabel="share of them", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    began = min((each.began for each in results), default=0.0)
    arrivals = [arrival - began for each in good for arrival in each.arrivals]
    axes[1][1].hist(arrivals, bins=60)
    axes[1][1].set(xlabel="seconds since the beginning", ylabel="pieces of answers")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error}", "png") from None
