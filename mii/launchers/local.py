"""Starts the processes of a deployment on this machine.

Each is started by exec, never forked: the caller may be a script without a main guard, a notebook,
or a program that has used CUDA or threads before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import mii
from mii.config import DeploymentConfig
from mii.control import ControlChannel, Start
from mii.parallel.memory import create_shared_memory, supported
from mii.pulse import Pulse

_TAIL_BYTES = 8192
_TAIL_LINES = 20


@dataclass(eq=False)
class Child:
    """A started process and our end of its control channel."""

    name: str  # such as "worker 0.1", for messages
    start: Start
    process: subprocess.Popen[bytes]
    channel: ControlChannel
    pulse: Pulse  # a worker's signs of life
    log: Path | None  # where its output goes; None: to the terminal
    killed: bool = field(default=False, init=False)  # by us, so that its death tells nothing

    def kill(self) -> None:
        """Kill the process if it has not ended by itself."""
        if self.process.poll() is None:
            self.killed = True
            self.process.kill()

    def wait_for_end(self, seconds: float) -> None:
        """Wait for the process to end by itself, and then make it."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def how_it_ended(self) -> str:
        """Put the exit status into words, with the last lines of the log."""
        status = self.process.returncode
        if status is None:
            words = "has closed its control channel"
        elif status < 0:
            words = f"was killed by {_signal_name(-status)}"
        else:
            words = f"exited with status {status}"
        tail = log_tail(self.log) if self.log else ""
        return f"{self.name} {words}" + (
            f"; the end of its log, {self.log}:\n{tail}" if tail else ""
        )


@dataclass(frozen=True)
class RankLinks:
    """What connects the ranks of one replica: memory that they share, and links for step plans.

    Descriptors are inherited by number. Close the links once all ranks have been started.
    """

    shared_memory_fd: int | None  # None: not needed, or not on this system
    rank0: tuple[socket.socket, ...]  # rank 0's ends, to rank 1, 2, ...
    others: tuple[socket.socket, ...]  # the ends of rank 1, 2, ...

    @staticmethod
    def create(size: int) -> RankLinks:
        """Make the links of `size` ranks."""
        if size == 1:
            return RankLinks(None, (), ())
        pairs = [socket.socketpair() for _ in range(size - 1)]
        rank0, others = zip(*pairs, strict=True)
        memory = create_shared_memory(size) if supported() else None
        return RankLinks(memory, rank0, others)

    def give(self, start: Start) -> Start:
        """Return a worker's start with the descriptors of its rank."""
        if start.rank == 0:
            plans = tuple(link.fileno() for link in self.rank0)
        else:
            plans = (self.others[start.rank - 1].fileno(),)
        return replace(start, shared_memory_fd=self.shared_memory_fd, plan_fds=plans)

    def close(self) -> None:
        """Close this process's copies."""
        for link in (*self.rank0, *self.others):
            link.close()
        if self.shared_memory_fd is not None:
            os.close(self.shared_memory_fd)


@dataclass(frozen=True)
class LocalLauncher:
    """Starts routers and workers as child processes. The modules' names are fields for tests."""

    logs: Path | None = None  # folder of the children's logs; None: they write to our own output
    router_module: str = "mii.router.main"
    worker_module: str = "mii.workers.main"

    def start_router(self, config: DeploymentConfig) -> Child:
        """Start the router."""
        return self._start("router", self.router_module, Start(config, "router"))

    def start_replica(self, config: DeploymentConfig, replica: int, first_port: int) -> list[Child]:
        """Start all ranks of a replica.

        Args:
            config: the deployment's.
            replica: which of its replicas.
            first_port: that rank 0 should take if it is free, the others the next ones; 0: any.
        """
        size = config.engine.tensor_parallel
        links = RankLinks.create(size)
        children: list[Child] = []
        try:
            for rank in range(size):
                port = first_port + rank if 0 < first_port <= 65535 - rank else 0
                start = Start(config, "worker", replica, rank, preferred_port=port)
                children.append(self.start_worker(links.give(start)))
        except BaseException:
            for child in children:
                child.kill()
            raise
        finally:
            links.close()
        return children

    def start_worker(self, start: Start) -> Child:
        """Start one rank of a replica."""
        return self._start(f"worker {start.replica}.{start.rank}", self.worker_module, start)

    def _start(self, name: str, module: str, start: Start) -> Child:
        # The kernel kills a child when the *thread* that started it ends, so only the main
        # thread's children can be tied to it.
        if threading.current_thread() is threading.main_thread():
            start = replace(start, parent_pid=os.getpid())
        log = self.logs / f"{name.replace(' ', '-').replace('.', '-')}.log" if self.logs else None
        pulse = Pulse.create()
        start = replace(start, pulse_fd=pulse.descriptor)
        given = (start.shared_memory_fd, start.pulse_fd, *start.plan_fds)
        inherited = [fd for fd in given if fd is not None]
        devices = devices_of(start.config, start.replica) if start.role == "worker" else ()
        extra = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        try:
            process, channel = spawn(module, log, inherited, extra_environment=extra)
        finally:
            pulse.close_descriptor()
        channel.send(start)
        return Child(name, start, process, channel, pulse, log)


def devices_of(config: DeploymentConfig, replica: int) -> tuple[str, ...]:
    """Return the GPUs of one replica, one a rank; replicas take turns if there are too few."""
    ranks = config.engine.tensor_parallel
    groups = len(config.devices) // ranks
    if groups == 0:
        return ()
    first = replica % groups * ranks
    return config.devices[first : first + ranks]


def spawn(
    module: str,
    log: Path | None,
    inherited: Iterable[int] = (),
    *,
    new_session: bool = False,
    extra_environment: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], ControlChannel]:
    """Start `python -P -m module --control-fd N`.

    Args:
        module: what to run.
        log: a new file for the output; None: the output goes where ours goes.
        inherited: descriptors that the process gets under their own numbers.
        new_session: give it a session of its own, away from this terminal's Ctrl-C.
        extra_environment: variables besides those that this process has.

    Returns:
        The process, and our end of its control channel.
    """
    channel, theirs = ControlChannel.pair()
    with contextlib.ExitStack() as closed_afterwards:
        closed_afterwards.callback(theirs.close)
        closed_on_error = closed_afterwards.enter_context(contextlib.ExitStack())
        closed_on_error.callback(channel.close)
        output = closed_afterwards.enter_context(_new_log(log)) if log else None
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--control-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=[theirs.fileno(), *inherited],
            env={**os.environ, "PYTHONPATH": _python_path(), **(extra_environment or {})},
            start_new_session=new_session,
        )
        closed_on_error.pop_all()
    return process, channel


def _new_log(path: Path) -> BinaryIO:
    if path.exists():  # of the process's former life, which may have ended badly
        path.replace(path.with_suffix(".previous.log"))
    return path.open("ab")


def log_tail(log: Path) -> str:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def _python_path() -> str:
    """Return a PYTHONPATH that finds this very package, even if it runs from a bare checkout."""
    root = str(Path(mii.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return f"{inherited}{os.pathsep}{root}" if inherited else root


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
