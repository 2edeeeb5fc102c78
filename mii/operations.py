"""What an operator asks of a running deployment: restart its replicas, have more or fewer of them.

One replica at a time, so that the others answer meanwhile; and one operation after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from mii.control import Operation, OperationEnded
from mii.supervised_replica import SupervisedReplica

_REMEMBERED: Final = 16  # operations that have ended


class ReplicaActions(Protocol):
    """What the supervisor does for an operation."""

    @property
    def replicas(self) -> Sequence[SupervisedReplica]:
        """All replicas, by number."""

    def add_replica(self, number: int) -> None:
        """Start a further replica."""

    def stop_replica(self, replica: SupervisedReplica, *, for_good: bool) -> None:
        """Move its requests away and end it; unless for good, start it again then."""

    def remove_replica(self, replica: SupervisedReplica) -> None:
        """Forget a replica that has ended."""


class Operations:
    """The operations that were asked for, the first of them under way.

    Args:
        actions: the supervisor.
        tell: passes on how an operation ended.
    """

    def __init__(self, actions: ReplicaActions, tell: Callable[[OperationEnded], None]) -> None:
        self._actions = actions
        self._tell = tell
        self._waiting: deque[Operation] = deque()
        self._current: Operation | None = None
        self._ended: deque[OperationEnded] = deque(maxlen=_REMEMBERED)
        self._to_restart: list[SupervisedReplica] = []
        self._awaited: set[SupervisedReplica] = set()  # that are to be ready, or gone

    def ask(self, operation: Operation) -> None:
        """Take on an operation; one that is known already is asked for by another router now."""
        for ended in self._ended:
            if ended.number == operation.number:
                self._tell(ended)
                return
        if operation == self._current or operation in self._waiting:
            return
        self._waiting.append(operation)
        if self._current is None:
            self._next_operation()

    def ready(self, replica: SupervisedReplica) -> None:
        """Note that a replica serves."""
        if replica in self._awaited and not replica.leaving:
            self._arrived(replica)

    def ended(self, replica: SupervisedReplica) -> None:
        """Note that a replica has ended: because it was told to, or by itself."""
        if replica.leaving and replica.leaves_for_good:
            self._actions.remove_replica(replica)
            self._arrived(replica)
        elif replica in self._awaited and not replica.leaving:
            self._awaited.clear()
            self._end(f"replica {replica.number} did not start: {replica.words}")

    def _next_operation(self) -> None:
        if not self._waiting:
            return
        self._current = self._waiting.popleft()
        if self._current.replicas is None:
            self._to_restart = list(self._actions.replicas)
            self._go_on()
        else:
            self._scale(self._current.replicas)

    def _scale(self, wanted: int) -> None:
        replicas = list(self._actions.replicas)
        used = {replica.number for replica in replicas}
        for number in [n for n in range(wanted + len(used)) if n not in used]:
            if len(self._actions.replicas) >= wanted:
                break
            self._actions.add_replica(number)
        self._awaited = {each for each in self._actions.replicas if each not in replicas}
        for replica in replicas[wanted:]:
            if replica.children_ended:
                self._actions.remove_replica(replica)
            else:
                self._awaited.add(replica)
                self._actions.stop_replica(replica, for_good=True)
        self._go_on()

    def _go_on(self) -> None:
        """Restart the next replica, if nothing is awaited; end the operation, if there is none."""
        if self._awaited:
            return
        if self._to_restart:
            replica = self._to_restart.pop(0)
            self._awaited = {replica}
            self._actions.stop_replica(replica, for_good=False)
        else:
            self._end("")

    def _arrived(self, replica: SupervisedReplica) -> None:
        self._awaited.discard(replica)
        if self._current is not None:
            self._go_on()

    def _end(self, error: str) -> None:
        operation, self._current = self._current, None
        self._to_restart = []
        if operation is not None:
            ended = OperationEnded(operation.number, error)
            self._ended.append(ended)
            self._tell(ended)
        self._next_operation()
