"""What a deployment is made of, and whether any of it is left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from mii.registry import DeploymentRecord

SECONDS = 5.0  # within which everything must be gone


@dataclass(frozen=True)
class Belongings:
    """Everything that a running deployment holds."""

    processes: list[psutil.Process]
    ports: list[int]
    shared_memory: frozenset[str]  # names that exist besides the deployment's

    @staticmethod
    def of(supervisor_pid: int) -> Belongings:
        """Look at a running deployment."""
        supervisor = psutil.Process(supervisor_pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        ports = [
            connection.laddr.port
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        return Belongings(processes, sorted(set(ports)), shared_memory_names())

    def assert_gone(self, record: DeploymentRecord | None = None) -> None:
        """See that all is gone in time."""
        _, alive = psutil.wait_procs(self.processes, timeout=SECONDS)
        alive = [process for process in alive if _runs(process)]
        assert not alive, f"still running: {alive}"
        for port in self.ports:
            socket.create_server(("127.0.0.1", port)).close()
        assert shared_memory_names() == self.shared_memory


def shared_memory_names() -> frozenset[str]:
    """Names of shared memory and of semaphores on this machine that are ours by their looks."""
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.exists() else []
    return frozenset(name for name in names if "mii" in name or name.startswith(("tmp", "psm_")))


def socket_files(folder: Path) -> list[Path]:
    """Socket files under a folder."""
    return [path for path in folder.rglob("*") if path.is_socket()]


@contextmanager
def no_new_children() -> Iterator[None]:
    """See that a block leaves no process of this one behind."""
    before = set(psutil.Process().children(recursive=True))
    yield
    new = [p for p in psutil.Process().children(recursive=True) if p not in before]
    _, alive = psutil.wait_procs(new, timeout=SECONDS)
    assert not alive, f"still running: {alive}"


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs; orphans that nobody has reaped do not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
