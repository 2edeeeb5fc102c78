"""Which deployments run on this machine: one small JSON file each, under the cache folder.

A file is as good as the supervisor that wrote it is alive: pid and start time of that process stand
in it, and a file whose supervisor is gone counts as absent and is removed by whoever meets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from mii.config import DeploymentConfig
from mii.errors import DeploymentError, DeploymentNotFoundError

_STOPPING_TIMEOUT = 10.0  # seconds that a new deployment waits for one of its name to end
_MAX_FILE_NAME = 150


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, and not another one that was given its pid later."""

    pid: int
    started: str  # as `start_of` returns it

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Return the identity of a running process."""
        return ProcessIdentity(pid, start_of(pid) or "")

    @property
    def alive(self) -> bool:
        """Whether the process runs. One that has ended and is not yet reaped does not."""
        return self.started != "" and start_of(self.pid) == self.started


@dataclass(frozen=True)
class ProcessRecord:
    """One process of a deployment, for `mii ps`."""

    role: str  # router or worker
    replica: int
    rank: int
    pid: int
    state: str  # starting, ready, leaving, restarting, dead
    port: int | None = None  # once it is ready
    last_words: str = ""  # why it has died


@dataclass(frozen=True)
class DeploymentRecord:
    """One deployment."""

    config: DeploymentConfig
    supervisor: ProcessIdentity
    state: str = "starting"  # starting, ready, stopping
    port: int | None = None  # where the router's gRPC listens, once it does
    rest_port: int | None = None
    processes: tuple[ProcessRecord, ...] = ()
    started: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.config.deployment_name

    @property
    def address(self) -> str:
        """Where clients on this machine reach the router, as host:port."""
        return address_of(self.config.host, self.port or 0)

    @property
    def rest_address(self) -> str | None:
        """Where clients on this machine reach the gateway; None without one."""
        return address_of(self.config.rest_host, self.rest_port) if self.rest_port else None

    def to_json(self) -> str:
        """Encode for the registry's file."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> DeploymentRecord:
        """Decode what `to_json` gave; raises ValueError, KeyError or TypeError for other text."""
        values = json.loads(text)
        return DeploymentRecord(
            **{
                **values,
                "config": DeploymentConfig.from_json(json.dumps(values["config"])),
                "supervisor": ProcessIdentity(**values["supervisor"]),
                "processes": tuple(ProcessRecord(**each) for each in values["processes"]),
            }
        )


class Registry:
    """The deployments under one cache folder. Used by several processes at once."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "deployments"
        self._logs = cache / "logs"

    def logs(self, name: str) -> Path:
        """Return the folder of a deployment's logs."""
        return self._logs / _file_name(name)

    def find(self, name: str) -> DeploymentRecord | None:
        """Return the running deployment of that name."""
        return self._read_alive(self._path(name))

    def get(self, name: str) -> DeploymentRecord:
        """Return the running deployment of that name.

        Raises:
            DeploymentNotFoundError: naming those that do run.
        """
        record = self.find(name)
        if record is not None:
            return record
        others = ", ".join(sorted(each.name for each in self.all())) or "none"
        raise DeploymentNotFoundError(
            f"no deployment named {name!r} is running (running: {others})"
        )

    def all(self) -> list[DeploymentRecord]:
        """Return the running deployments, oldest first."""
        records = [self._read_alive(path) for path in self._folder.glob("*.json")]
        return sorted((r for r in records if r is not None), key=lambda record: record.started)

    def claim(self, record: DeploymentRecord) -> None:
        """Enter a new deployment; one of the same name that is just stopping is waited for.

        Raises:
            DeploymentError: if a deployment of that name runs, or the file cannot be written.
        """
        deadline = time.monotonic() + _STOPPING_TIMEOUT
        while True:
            with self._locked():
                other = self._read(self._path(record.name))
                if other is None or not other.supervisor.alive:
                    self._write(record)
                    return
            if other.state != "stopping" or time.monotonic() > deadline:
                raise name_taken(other)
            time.sleep(0.02)

    def update(self, record: DeploymentRecord) -> None:
        """Write a deployment's new state. Only its supervisor does so."""
        with self._locked():
            self._write(record)

    def remove(self, record: DeploymentRecord) -> None:
        """Remove a deployment that has ended, unless another one has taken its name meanwhile."""
        with self._locked():
            current = self._read(self._path(record.name))
            if current is not None and current.supervisor == record.supervisor:
                self._path(record.name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{_file_name(name)}.json"

    def _read(self, path: Path) -> DeploymentRecord | None:
        try:
            return DeploymentRecord.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent, or of another version of mii

    def _read_alive(self, path: Path) -> DeploymentRecord | None:
        record = self._read(path)
        if record is None or record.supervisor.alive:
            return record
        with contextlib.suppress(DeploymentError):  # a cache that may only be read
            self.remove(record)
        return None

    def _write(self, record: DeploymentRecord) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(record.to_json())
        os.replace(temporary, self._path(record.name))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from changing the registry; short, and the lock dies with us."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise DeploymentError(
                f"cannot write to the registry of deployments: {error}; MII_CACHE_PATH chooses "
                "another cache folder"
            ) from error


def name_taken(other: DeploymentRecord) -> DeploymentError:
    """Return the error of a second deployment of one name."""
    where = f", at {other.address}" if other.port else ""
    return DeploymentError(
        f"a deployment named {other.name!r} is already running{where} (supervisor pid "
        f"{other.supervisor.pid}): stop it with `mii stop {other.name}`, connect to it with "
        f"mii.client({other.name!r}), or give this one another deployment_name"
    )


def mark(record: DeploymentRecord, process: ProcessRecord) -> DeploymentRecord:
    """Return the record with one process's entry added or replaced."""
    place = (process.role, process.replica, process.rank)
    others = [p for p in record.processes if (p.role, p.replica, p.rank) != place]
    ordered = sorted([*others, process], key=lambda p: (p.role, p.replica, p.rank))
    return replace(record, processes=tuple(ordered))


def without_replica(record: DeploymentRecord, replica: int) -> DeploymentRecord:
    """Return the record without the processes of a replica."""
    others = (p for p in record.processes if p.role != "worker" or p.replica != replica)
    return replace(record, processes=tuple(others))


def address_of(host: str, port: int) -> str:
    """Return where a client on this machine reaches a server that listens on `host`."""
    host = host.strip("[]")
    if host in ("", "0.0.0.0", "::"):
        host = "localhost"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start_of(pid: int) -> str | None:
    """Return when a process was started, in terms that no later process shares; None if it ended.

    A process that has ended but was not reaped counts as ended.
    """
    if sys.platform == "linux":
        return _start_on_linux(pid)
    command = ["ps", "-p", str(pid), "-o", "stat=,lstart="]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return None if not answer or answer.startswith("Z") else answer.split(maxsplit=1)[-1]


def _start_on_linux(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # Fields after the command's name, which may hold blanks and brackets: state is the third of
    # all, the start time in clock ticks since boot the twenty-second (proc(5)).
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else f"{boot}:{after_name[19]}"


def _file_name(name: str) -> str:
    """Return a file name for a deployment's name: readable, and different for different names."""
    quoted = quote(name, safe=" ", errors="surrogatepass")
    if len(quoted) <= _MAX_FILE_NAME and quoted.strip(". ") == quoted:
        return quoted
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{quoted[:_MAX_FILE_NAME].strip('. ')}-{digest}"
