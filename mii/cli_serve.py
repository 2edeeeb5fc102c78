"""`mii serve` and `mii plan`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from mii.api import complete_deployment, configure_deployment
from mii.cli import options_of
from mii.launch import RunningDeployment, start_attached, start_deployment
from mii.options import deployment_config
from mii.progress_display import ProgressDisplay
from mii.surfaces import describe_surfaces


def serve(parsed: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or the end of the deployment."""
    signal.signal(signal.SIGTERM, _interrupt)
    values = {"model_name_or_path": parsed.model, **options_of(parsed)}
    with ProgressDisplay() as show:
        config, _ = configure_deployment(values, "mii serve", show)
        if parsed.detach:
            running = start_deployment(config, show)
        else:
            attached = running = start_attached(config, show)
    _print_surfaces(running)
    if parsed.detach:
        print(f"  mii stop {config.deployment_name} ends it", flush=True)
        return 0
    try:
        print("  Ctrl-C stops it", flush=True)
        attached.wait(lambda what, fraction: print(what, file=sys.stderr))
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
    finally:
        attached.stop()
    return 0


def plan(parsed: argparse.Namespace) -> int:
    """Print the decisions of the strategy engine, with their reasons."""
    values = {"model_name_or_path": parsed.model, **options_of(parsed)}
    with ProgressDisplay() as show:
        config, chosen = complete_deployment(deployment_config(values, "mii plan"), show)
    replicas, ranks = config.replica_num, config.engine.tensor_parallel
    print(f"{config.engine.model_name}: {config.engine.model_path}")
    print(f"replicas: {replicas}, each of {ranks} process{'es' if ranks > 1 else ''}\n")
    rows = [(each.what, each.value, each.why) for each in chosen.decisions]
    print_columns([("WHAT", "VALUE", "WHY"), *rows])
    return 0


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of the same length in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_surfaces(running: RunningDeployment) -> None:
    config = running.config
    print(f"{config.deployment_name} is ready")
    for line in describe_surfaces(config, running.port, running.rest_port):
        print(f"  {line}", flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
