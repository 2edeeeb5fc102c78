"""The supervisor of one deployment: `python -P -m mii.deployment --control-fd N`.

It starts the router and the workers, tells the router which replicas can answer, starts again those
that die or hang, and ends them all when a client asks for it, on SIGTERM or SIGINT, and when the
starter goes away without having sent Detach. It holds no torch and no gRPC. Children exit when
their control channel closes, so nothing outlives a killed supervisor.

One thread a child reads its messages into one queue; everything is decided in the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mii import logs
from mii.config import DeploymentConfig
from mii.control import (
    ControlChannel,
    Detach,
    Died,
    Failed,
    Message,
    Operation,
    Progress,
    Ready,
    Replica,
    Replicas,
    Stop,
    Terminate,
)
from mii.errors import DeploymentError, MIIError
from mii.launchers.local import Child, LocalLauncher
from mii.operations import Operations
from mii.registry import (
    DeploymentRecord,
    ProcessIdentity,
    ProcessRecord,
    Registry,
    mark,
    without_replica,
)
from mii.supervised_replica import CausesOfDeath, SupervisedReplica
from mii.supervised_router import SupervisedRouter
from mii.supervision_events import (
    Ended,
    Event,
    Said,
    Signalled,
    StarterGone,
    StarterSaid,
    TimeToLook,
)

_STOP_SECONDS = 3.0  # that children have for an orderly end
_LOOK_SECONDS = 0.5  # between two looks at what nobody sends a message about
_LEAVE_SECONDS = 3.0  # that a child has to exit after it has closed its control channel

_logger = logging.getLogger("mii.deployment")


class Supervisor:
    """Runs one deployment from its start to its end, in the main thread."""

    def __init__(
        self,
        config: DeploymentConfig,
        starter: ControlChannel,
        launcher: LocalLauncher,
        registry: Registry,
    ) -> None:
        self._config = config
        self._starter = starter
        self._launcher = launcher
        self._registry = registry
        self._record = DeploymentRecord(config, ProcessIdentity.of(os.getpid()))
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._router = SupervisedRouter(config)
        self.replicas: list[SupervisedReplica] = []
        self._operations = Operations(self, self._router.tell)
        self._running: list[Child] = []  # whose end has not been seen
        self._last_words: dict[Child, Failed] = {}
        self._announced = False  # the starter knows that the deployment is ready
        self._detached = False
        self._stopping = False
        self._busy_with: dict[Child, str] = {}  # children that are not ready
        self._progressed: dict[Child, float] = {}  # when they last said so; time.monotonic()
        self._deaths = CausesOfDeath()
        self._next_look = time.monotonic()

    def run(self) -> int:
        """Run the deployment; return the process's exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            self._registry.claim(self._record)
        except MIIError as error:
            self._starter.send(Failed.of(error))
            return 1
        try:
            self._run()
        except Exception as error:
            if not isinstance(error, MIIError):
                _logger.exception("the supervisor cannot go on")
            _logger.error("%s", error)
            self._starter.send(Failed.of(error))
            return 1
        finally:
            self._stop_children()
            with contextlib.suppress(MIIError):  # whoever meets the entry next removes it
                self._registry.remove(self._record)
            _logger.info("the deployment has ended")
        return 0

    def _run(self) -> None:
        threading.Thread(target=self._read_starter, daemon=True).start()
        self._progress("starting the router")
        self._start_router()
        while not self._stopping:
            self._handle(self._next_event())

    def _next_event(self) -> Event:
        if (seconds := self._next_look - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=seconds)
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return TimeToLook()

    def _handle(self, event: Event) -> None:
        match event:
            case Said(child, Failed() as failed):
                self._last_words[child] = failed
                _logger.error("%s: %s", child.name, failed.message)
                self._kill(self._siblings(child))
            case Said(child, message) if child is self._router.child:
                self._router_said(child, message)
            case Said(child, message):
                self._worker_said(child, message)
            case Ended(child) if child is self._router.child:
                self._router_ended(child)
            case Ended(child):
                self._worker_ended(child)
            case StarterSaid(Detach()):
                self._detached = True
            case StarterSaid(Stop()):
                self._stop("the program that started it asked for its end")
            case StarterGone() if not self._detached:
                self._stop("the program that started it is gone")
            case Signalled(number):
                self._stop(signal.Signals(number).name)
            case TimeToLook():
                self._look()

    def _stop(self, reason: str) -> None:
        _logger.info("stopping: %s", reason)
        self._stopping = True

    # The router

    def _start_router(self) -> None:
        self._router.begin(self._adopt(self._launcher.start_router(self._router.config_to_start)))

    def _router_said(self, router: Child, message: Message) -> None:
        if isinstance(message, Terminate):
            self._stop("a client asked for the end of the deployment")
        elif isinstance(message, Ready):
            self._router.serves(message)
            self._record = replace(self._record, port=message.port, rest_port=message.rest_port)
            self._busy_with.pop(router)
            self._note([router], "ready", message.port)
            _logger.info("the router listens on port %d", message.port)
            if self.replicas:  # it has died, and they have not
                self._tell_router()
                return
            self._progress("starting the workers")
            for number in range(self._config.replica_num):
                self.add_replica(number)
        elif isinstance(message, Operation):
            self._operations.ask(message)

    def _router_ended(self, router: Child) -> None:
        self._running.remove(router)
        self._busy_with.pop(router, None)
        cause = self._cause([router])
        self._last_words.pop(router, None)
        as_asked = router.process.returncode == 0
        if not self._router.died(as_asked=as_asked):
            raise cause
        _logger.log(logging.INFO if as_asked else logging.ERROR, "the router has ended: %s", cause)
        self._note([router], "restarting", self._record.port, "" if as_asked else str(cause))
        if self._router.restart_at is not None:
            self._next_look = min(self._next_look, self._router.restart_at)

    # See mii.operations.ReplicaActions.

    def add_replica(self, number: int) -> None:
        """Start a further replica."""
        assert self._record.port is not None
        port = self._record.port + 1 + number * self._config.engine.tensor_parallel
        replica = SupervisedReplica(number, port, self._config.max_restarts)
        self.replicas.append(replica)
        self.replicas.sort(key=lambda each: each.number)
        self._start_replica(replica)
        self._tell_router()

    def stop_replica(self, replica: SupervisedReplica, *, for_good: bool) -> None:
        """Move a replica's requests away and end it; unless for good, start it again then."""
        if not replica.children_ended:
            _logger.info("replica %d is told to end", replica.number)
            replica.leave(for_good)
            self._note(replica.children, "leaving")
            self._tell_router()
        else:  # it is dead, or about to be started again anyway
            replica.left()
            self._next_look = time.monotonic()

    def remove_replica(self, replica: SupervisedReplica) -> None:
        """Forget a replica that has ended."""
        self.replicas.remove(replica)
        self._record = without_replica(self._record, replica.number)
        self._save()
        self._tell_router()

    def _start_replica(self, replica: SupervisedReplica) -> None:
        replica.begin(self._launcher.start_replica(self._config, replica.number, replica.port))
        for child in replica.children:
            self._adopt(child)

    def _tell_router(self) -> None:
        """Tell the router about every replica."""
        replicas = (
            Replica(
                each.number,
                each.address,
                ready=each.is_ready,
                returning=each.served and not each.is_ready and not each.given_up,
                dead=each.given_up,
                words=each.words,
                busy_with=self._busy_with.get(each.children[0], ""),
            )
            for each in self.replicas
            if not (each.leaving and each.leaves_for_good)
        )
        self._router.tell(Replicas(tuple(replicas)))

    # Workers

    def _worker_said(self, child: Child, message: Message) -> None:
        if isinstance(message, Progress):
            is_news = message.what != self._busy_with.get(child)
            self._busy_with[child] = message.what
            if is_news and child.start.rank == 0:
                self._tell_router()
            self._progressed[child] = time.monotonic()
            several = self._config.replica_num > 1
            prefix = f"replica {child.start.replica}: " if several else ""
            if child.start.rank == 0:  # the others do the same at the same time
                self._progress(prefix + message.what, message.fraction)
        elif isinstance(message, Ready):
            replica = self._replica_of(child)
            replica.rank_ready(child.start.rank, message)
            self._busy_with.pop(child, None)
            self._note([child], "ready", message.port)
            self._tell_router()
            self._progress(f"{child.name} is ready")
            if replica.is_ready and self._announced:
                _logger.info("replica %d serves", replica.number)
                self._operations.ready(replica)
            if all(each.is_ready for each in self.replicas) and not self._announced:
                self._announce()

    def _announce(self) -> None:
        self._announced = True
        self._record = replace(self._record, state="ready")
        self._save()
        port = self._record.port
        assert port is not None
        self._starter.send(Ready(port, self._record.rest_port))
        _logger.info("the deployment is ready")

    def _worker_ended(self, child: Child) -> None:
        """See a rank end. The others of its replica are of no use without it."""
        self._running.remove(child)
        self._busy_with.pop(child, None)
        self._progressed.pop(child, None)
        replica = self._replica_of(child)
        if not replica.ended and replica.ready:
            by_itself = self._deaths.by_itself(child.process.returncode, child.killed)
            died = Died(replica.number, replica.address, replica.computing(), by_itself)
            self._router.tell(died)
        replica.ended.add(child.start.rank)
        self._kill(replica.children)
        if len(replica.ended) == len(replica.children):
            self._replica_died(replica)
        else:
            self._tell_router()

    def _replica_died(self, replica: SupervisedReplica) -> None:
        if replica.leaving:
            replica.left()
            self._note(replica.children, "restarting")
            self._tell_router()
            self._operations.ended(replica)
            self._next_look = time.monotonic()
            return
        cause = self._cause(replica.children)
        if not self._announced:
            raise cause
        for child in replica.children:
            self._last_words.pop(child, None)
        replica.died(str(cause))
        words = f"replica {replica.number} has died: {cause}"
        if replica.given_up:
            words += f"; it is not started again (max_restarts = {replica.max_restarts})"
        _logger.error("%s", words)
        state = "dead" if replica.given_up else "restarting"
        self._note(replica.children, state, None, str(cause))
        self._tell_router()
        self._starter.send(Progress(words))
        self._operations.ended(replica)
        if replica.restart_at is not None:
            self._next_look = min(self._next_look, replica.restart_at)

    def _look(self) -> None:
        """Do what the time has come for: find what hangs, and start again what has died."""
        now = time.monotonic()
        if self._router.restart_at is not None and now >= self._router.restart_at:
            _logger.info("the router is started again")
            self._start_router()
        elif (why := self._router.standstill()) is not None and self._router.child is not None:
            words = f"the router hangs: {why}"
            self._last_words[self._router.child] = Failed(DeploymentError.code, words)
            self._router.child.kill()
        for child in [c for c, since in self._progressed.items() if c in self._busy_with]:
            if now - self._progressed[child] > self._config.startup_timeout:
                self._start_stalled(child)
        for replica in self.replicas:
            if replica.restart_at is not None and now >= replica.restart_at:
                _logger.info("replica %d is started again", replica.number)
                self._start_replica(replica)
                self._tell_router()
            elif replica.leave_by is not None and now >= replica.leave_by:
                self._kill(replica.children)
            elif (hung := replica.hung_rank()) is not None:
                child, why = hung
                self._last_words[child] = Failed(DeploymentError.code, f"{child.name} hangs: {why}")
                self._kill(replica.children)

    def _start_stalled(self, child: Child) -> None:
        """Give up a start in which nothing moves any more."""
        seconds = f"{self._config.startup_timeout:g} seconds (startup_timeout)"
        if self._announced:
            words = f"{child.name} did not start: nothing has moved for {seconds}"
            self._last_words[child] = Failed(DeploymentError.code, words)
            self._kill(self._siblings(child))
            return
        moved = max(self._progressed[each] for each in self._busy_with)
        if time.monotonic() - moved <= self._config.startup_timeout:
            return  # others still move, and it may have to wait for them
        waiting = ", ".join(f"{c.name} ({what})" for c, what in self._busy_with.items())
        raise DeploymentError(
            f"the deployment did not start: nothing has moved for {seconds}; not ready are "
            f"{waiting}; the logs are in {self._launcher.logs}"
        )

    def _cause(self, children: Iterable[Child]) -> MIIError:
        """Return why processes that belong together have ended, in their own words if possible."""
        own = [child for child in children if child in self._last_words or not child.killed]
        errors = [self._last_words[child].to_error() for child in own if child in self._last_words]
        for error in errors:
            if type(error) is not DeploymentError:  # foreseen, so it says all there is to say
                return error
        words = [
            f"{child.name}: {self._last_words[child].message}"
            if child in self._last_words
            else child.how_it_ended()
            for child in own
        ]
        return DeploymentError("; ".join(dict.fromkeys(words)))

    # Children and those who watch them

    def _adopt(self, child: Child) -> Child:
        self._running.append(child)
        self._busy_with[child] = "starting"
        self._progressed[child] = time.monotonic()
        self._note([child], "starting")
        threading.Thread(target=self._read_child, args=(child,), daemon=True).start()
        return child

    def _read_child(self, child: Child) -> None:
        """Pass on what a child says, and then its end."""
        try:
            for message in child.channel.messages():
                self._events.put(Said(child, message))
        except MIIError:
            _logger.exception("%s does not speak our language", child.name)
        child.wait_for_end(_LEAVE_SECONDS)
        self._events.put(Ended(child))

    def _read_starter(self) -> None:
        for message in self._starter.messages():
            self._events.put(StarterSaid(message))
        self._events.put(StarterGone())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(Signalled(number))

    def _siblings(self, child: Child) -> list[Child]:
        return [child] if child is self._router.child else self._replica_of(child).children

    def _replica_of(self, child: Child) -> SupervisedReplica:
        return next(each for each in self.replicas if child in each.children)

    def _kill(self, children: Iterable[Child]) -> None:
        for child in children:
            child.kill()

    def _stop_children(self) -> None:
        """End all children: SIGTERM, three seconds, SIGKILL."""
        self._record = replace(self._record, state="stopping")
        self._save()
        for child in self._running:
            child.channel.send(Stop())
            child.process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for child in self._running:
            child.wait_for_end(max(0.0, deadline - time.monotonic()))

    # What others are told

    def _progress(self, what: str, fraction: float | None = None) -> None:
        if self._announced:
            return
        self._starter.send(Progress(what, fraction))

    def _note(
        self,
        children: Iterable[Child],
        state: str,
        port: int | None = None,
        last_words: str = "",
    ) -> None:
        """Enter children's state in the registry."""
        for child in children:
            start, pid = child.start, child.process.pid
            self._record = mark(
                self._record,
                ProcessRecord(start.role, start.replica, start.rank, pid, state, port, last_words),
            )
        self._save()

    def _save(self) -> None:
        try:
            self._registry.update(self._record)
        except MIIError as error:  # a full disk must not end a deployment that serves
            _logger.warning("%s", error)


def main() -> None:
    """Run the process."""
    channel = ControlChannel.from_arguments(sys.argv[1:])
    config = channel.receive_start().config
    logs.set_up("supervisor", config)
    registry = Registry(Path(config.cache_path))
    launcher = LocalLauncher(registry.logs(config.deployment_name))
    sys.exit(Supervisor(config, channel, launcher, registry).run())


if __name__ == "__main__":
    main()
