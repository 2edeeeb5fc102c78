"""Starts deployments, and ends them: what stands between a script and its supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mii.config import DeploymentConfig
from mii.control import ControlChannel, Detach, Failed, Message, Progress, Ready, Start, Stop
from mii.errors import DeploymentError, MIIError
from mii.launchers.local import log_tail, spawn
from mii.registry import DeploymentRecord, ProcessIdentity, Registry, address_of, name_taken

_END_SECONDS = 5.0  # within which all of a deployment is gone

ShowProgress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class RunningDeployment:
    """A deployment that has just been started."""

    config: DeploymentConfig
    port: int  # of the router's gRPC
    rest_port: int | None  # of its gateway, if there is one
    supervisor: subprocess.Popen[bytes]
    logs: Path

    @property
    def address(self) -> str:
        """Where clients on this machine reach the router, as host:port."""
        return address_of(self.config.host, self.port)

    @property
    def rest_address(self) -> str | None:
        """Where clients on this machine reach the gateway; None without one."""
        return address_of(self.config.rest_host, self.rest_port) if self.rest_port else None


@dataclass(frozen=True)
class AttachedDeployment(RunningDeployment):
    """A deployment that ends with this process, in whatever way that ends."""

    channel: ControlChannel

    def wait(self, show: ShowProgress) -> None:
        """Wait for its end, showing what happens to it meanwhile.

        Raises:
            MIIError: if it has failed.
        """
        failure: MIIError | None = None
        for message in self.channel.messages():
            if isinstance(message, Progress):
                show(message.what, message.fraction)
            elif isinstance(message, Failed):
                failure = message.to_error()
        self.channel.close()
        self.supervisor.wait()
        if failure is not None:
            raise failure
        if self.supervisor.returncode != 0:
            raise _died(self.supervisor, self.logs)

    def stop(self) -> None:
        """End it; returns when all of it is gone."""
        self.channel.send(Stop())
        _end(self.supervisor)
        self.channel.close()


def start_deployment(
    config: DeploymentConfig, show: ShowProgress, module: str = "mii.deployment"
) -> RunningDeployment:
    """Start a deployment that lives on when this process ends; return when it is ready.

    Args:
        config: what to start.
        show: told what the start is busy with, and which fraction of that is done.
        module: the supervisor's, for tests.

    Raises:
        DeploymentError, ModelError, PortInUse, InvalidArgument: if it cannot start, in the words
            of the process that failed. Nothing is left running then, nor after KeyboardInterrupt.
    """
    attached = start_attached(config, show, module)
    attached.channel.send(Detach())
    attached.channel.close()
    # While this process lives it is the supervisor's parent, and only a parent can lay it to rest.
    threading.Thread(target=attached.supervisor.wait, name="mii reaper", daemon=True).start()
    return RunningDeployment(
        config,
        attached.port,
        attached.rest_port,
        attached.supervisor,
        attached.logs,
    )


def start_attached(
    config: DeploymentConfig, show: ShowProgress, module: str = "mii.deployment"
) -> AttachedDeployment:
    """Start a deployment that ends with this process; otherwise as `start_deployment`."""
    registry = Registry(Path(config.cache_path))
    other = registry.find(config.deployment_name)
    if other is not None and other.state != "stopping":
        raise name_taken(other)
    logs = registry.logs(config.deployment_name)
    try:
        logs.mkdir(parents=True, exist_ok=True)
        supervisor, channel = spawn(module, logs / "supervisor.log", new_session=True)
    except OSError as error:
        raise DeploymentError(
            f"cannot start a deployment with its logs in {logs}: {error}"
        ) from error
    try:
        channel.send(Start(config, "supervisor"))
        ready = _wait_until_ready(channel, supervisor, logs, show)
    except BaseException:
        channel.close()
        _end(supervisor)
        raise
    return AttachedDeployment(config, ready.port, ready.rest_port, supervisor, logs, channel)


def stop_deployment(record: DeploymentRecord) -> None:
    """End a deployment of the registry; returns when all of it is gone.

    Raises:
        DeploymentError: if a process of it does not end.
    """
    members = _members(record)
    _signal(record.supervisor, signal.SIGTERM)
    if not _gone(members) and record.supervisor.alive:
        # The supervisor leads a process group, in which all its children are.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record.supervisor.pid, signal.SIGKILL)
    _check_gone(record, members)


def waiter_for_end(record: DeploymentRecord) -> Callable[[], None]:
    """Return a function that waits until all of a deployment is gone, once it was told to end."""
    members = _members(record)
    return lambda: _check_gone(record, members)


def _members(record: DeploymentRecord) -> list[ProcessIdentity]:
    return [record.supervisor, *(ProcessIdentity.of(process.pid) for process in record.processes)]


def _check_gone(record: DeploymentRecord, members: list[ProcessIdentity]) -> None:
    if not _gone(members):
        left = ", ".join(str(member.pid) for member in members if member.alive)
        raise DeploymentError(f"processes of deployment {record.name!r} do not end: {left}")


def _wait_until_ready(
    channel: ControlChannel, supervisor: subprocess.Popen[bytes], logs: Path, show: ShowProgress
) -> Ready:
    message: Message | None
    while (message := channel.receive()) is not None:
        if isinstance(message, Progress):
            show(message.what, message.fraction)
        elif isinstance(message, Ready):
            return message
        elif isinstance(message, Failed):
            raise message.to_error()
    with contextlib.suppress(subprocess.TimeoutExpired):
        supervisor.wait(_END_SECONDS)
    raise _died(supervisor, logs)


def _died(supervisor: subprocess.Popen[bytes], logs: Path) -> DeploymentError:
    log = logs / "supervisor.log"
    return DeploymentError(
        f"the deployment's supervisor died with status {supervisor.returncode}; the end of its "
        f"log, {log}:\n{log_tail(log)}"
    )


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    """Wait for a supervisor that has been told to end, and make it if it does not."""
    try:
        supervisor.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()


def _signal(process: ProcessIdentity, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.alive:
            os.kill(process.pid, number)


def _gone(processes: list[ProcessIdentity]) -> bool:
    """Wait until all processes are gone, for as long as that may take."""
    deadline = time.monotonic() + _END_SECONDS
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
