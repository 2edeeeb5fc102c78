"""`mii ps`, `mii logs` and `mii stop`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from mii.api import find_deployment
from mii.cli_serve import print_columns
from mii.errors import DeploymentNotFoundError, InvalidArgument
from mii.launch import stop_deployment
from mii.models.checkpoint import default_cache
from mii.options import default_deployment_name, model_name_of
from mii.registry import DeploymentRecord, Registry

_POLL_SECONDS = 0.2
_TAIL_BYTES = 1 << 20  # within which the last lines are looked for


def ps(parsed: argparse.Namespace) -> int:
    """List the deployments that run."""
    records = Registry(default_cache()).all()
    if not records:
        print("no deployment is running")
        return 0
    rows = [("NAME", "STATE", "GRPC", "REST", "REPLICAS", "UP", "PID")]
    print_columns([*rows, *map(_row, records)])
    for record in records:
        if parsed.all:
            print(f"\n{record.name}: {record.config.engine.model_path}")
            _print_processes(record)
        for process in record.processes:
            if process.state == "dead" and process.rank == 0:
                print(f"\n{record.name}, replica {process.replica} is dead: {process.last_words}")
    return 0


def _row(record: DeploymentRecord) -> tuple[str, ...]:
    config = record.config
    replicas: dict[int, bool] = {}
    for process in record.processes:
        if process.role == "worker":
            ready = replicas.get(process.replica, True) and process.state == "ready"
            replicas[process.replica] = ready
    seconds = int(time.time() - record.started)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    up = (
        f"{days}d"
        if days
        else f"{hours}h"
        if hours
        else f"{minutes}m"
        if minutes
        else f"{seconds}s"
    )
    return (
        record.name,
        record.state,
        record.address if record.port else "-",
        record.rest_address or "-",
        f"{sum(replicas.values())}/{len(replicas) or config.replica_num} ready",
        up,
        str(record.supervisor.pid),
    )


def _print_processes(record: DeploymentRecord) -> None:
    rows = [("PROCESS", "STATE", "PORT", "PID")]
    for process in record.processes:
        place = f"-{process.replica}-{process.rank}" if process.role == "worker" else ""
        port = str(process.port or "-")
        rows.append((f"{process.role}{place}", process.state, port, str(process.pid)))
    print_columns(rows)


def stop(parsed: argparse.Namespace) -> int:
    """End deployments; returns when they are gone."""
    registry = Registry(default_cache())
    if parsed.all == bool(parsed.names):
        raise InvalidArgument("give either names of deployments or --all", "names")
    records = registry.all()
    if parsed.names:
        records = [find_deployment(name) or registry.get(name) for name in parsed.names]
    for record in records:
        stop_deployment(record)
        print(f"{record.name} has ended", flush=True)
    if not records:
        print("no deployment is running")
    return 0


def logs(parsed: argparse.Namespace) -> int:
    """Print the end of a deployment's logs, and what is added to them."""
    registry = Registry(default_cache())
    name, folder = _log_folder(registry, parsed.name)
    files = sorted(folder.glob(f"{parsed.process or '*'}.log"))
    if not files:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.log")))
        raise InvalidArgument.of("--process", parsed.process, f"one of {known}")
    followed = [_LogFile(path, heading=len(files) > 1) for path in files]
    for file in followed:
        file.print_tail(parsed.lines)
    while parsed.follow:
        alive = registry.find(name) is not None
        printed = [file.print_new() for file in followed]
        if not any(printed):
            if not alive:
                break
            time.sleep(_POLL_SECONDS)
    return 0


class _LogFile:
    """A log that is printed as it grows."""

    def __init__(self, path: Path, heading: bool) -> None:
        self._path = path
        self._prefix = f"{path.stem}: " if heading else ""
        self._position = max(0, path.stat().st_size - _TAIL_BYTES)

    def print_tail(self, lines: int) -> None:
        """Print the last lines."""
        self._print(self._read().splitlines()[-lines:] if lines > 0 else [])

    def print_new(self) -> bool:
        """Print what was added; return whether anything was."""
        lines = self._read().splitlines()
        self._print(lines)
        return bool(lines)

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            print(self._prefix + line, flush=True)

    def _read(self) -> str:
        """Return what was added; a line under way comes when it is complete."""
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:  # a new deployment, a new log
                self._position = 0
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.decode("utf-8", "replace")


def _log_folder(registry: Registry, name: str) -> tuple[str, Path]:
    """Return the deployment's full name, and the folder of its logs."""
    for full in (name, default_deployment_name(model_name_of(name))):
        if registry.logs(full).is_dir():
            return full, registry.logs(full)
    raise DeploymentNotFoundError(f"there are no logs of a deployment named {name!r}")
