"""One replica as its supervisor sees it: its ranks, and when it is started again after a death."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Final

from mii.control import Ready, Stop
from mii.launchers.local import Child
from mii.pulse import HangWatch, processor_seconds

# A replica that has served for so long did not die of its start: the count begins anew.
_STABLE_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 4.0  # that a replica has to end when it is told to
_FIRST_PAUSE: Final = 0.25  # seconds until a replica that has died is started again
_LONGEST_PAUSE: Final = 30.0


@dataclass(eq=False)
class _Watched:
    """A rank that serves, between two looks at it."""

    watch: HangWatch = field(default_factory=HangWatch)
    looked: float = field(default_factory=time.monotonic)
    processor: float = 0.0


@dataclass(eq=False)
class SupervisedReplica:
    """The ranks of one replica and what is known of them.

    Args:
        number: of the replica in the deployment.
        port: that its rank 0 should listen on.
        max_restarts: deaths in a row, none of them after a stable time, that it is started again
            after.
    """

    number: int
    port: int
    max_restarts: int
    children: list[Child] = field(default_factory=list, init=False)  # by rank
    ready: dict[int, Ready] = field(default_factory=dict, init=False)  # by rank
    ended: set[int] = field(default_factory=set, init=False)  # ranks
    served: bool = field(default=False, init=False)  # it has been ready
    words: str = field(default="", init=False)  # why it died last
    restart_at: float | None = field(default=None, init=False)  # time.monotonic()
    given_up: bool = field(default=False, init=False)
    leaving: bool = field(default=False, init=False)  # it was told to end
    leaves_for_good: bool = field(default=False, init=False)
    leave_by: float | None = field(default=None, init=False)  # time.monotonic()
    _deaths: int = field(default=0, init=False)  # in a row
    _ready_since: float | None = field(default=None, init=False)
    _watched: dict[int, _Watched] = field(default_factory=dict, init=False)  # by rank

    def begin(self, children: list[Child]) -> None:
        """Take on the processes of a new start."""
        self.children = children
        self.ready, self.ended, self._watched = {}, set(), {}
        self.restart_at = self._ready_since = None
        self.given_up = self.leaving = False
        self.leave_by = None

    def rank_ready(self, rank: int, message: Ready) -> None:
        """Note that a rank serves."""
        self.ready[rank] = message
        child = self.children[rank]
        self._watched[rank] = _Watched(processor=processor_seconds(child.process.pid))
        if self.is_ready:
            self.served = True
            self._ready_since = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether every rank serves, and is to go on with it."""
        all_ready = bool(self.children) and len(self.ready) == len(self.children)
        return all_ready and not self.ended and not self.leaving

    @property
    def children_ended(self) -> bool:
        """Whether none of its processes is left."""
        return len(self.ended) == len(self.children)

    @property
    def address(self) -> str:
        """Where rank 0 listens; "" while it does not."""
        return f"127.0.0.1:{self.ready[0].port}" if 0 in self.ready and not self.ended else ""

    def leave(self, for_good: bool) -> None:
        """Tell all ranks to end in an orderly way."""
        self.leaving, self.leaves_for_good = True, for_good
        self.leave_by = time.monotonic() + _LEAVE_SECONDS
        for child in self.children:
            child.channel.send(Stop())

    def left(self) -> None:
        """Note that it has ended as it was told to."""
        self._deaths, self.leave_by = 0, None
        self.restart_at = None if self.leaves_for_good else time.monotonic()

    def died(self, words: str) -> None:
        """Note a death, and decide whether and when there is another start."""
        now = time.monotonic()
        self.words = words
        if self._ready_since is not None and now - self._ready_since >= _STABLE_SECONDS:
            self._deaths = 0
        self._deaths += 1
        self.given_up = self._deaths > self.max_restarts
        if not self.given_up:
            self.restart_at = now + min(_FIRST_PAUSE * 2 ** (self._deaths - 1), _LONGEST_PAUSE)

    def hung_rank(self) -> tuple[Child, str] | None:
        """Look at all ranks that serve; return one that has come to a standstill, and the signs."""
        now = time.monotonic()
        for rank, watched in self._watched.items():
            child = self.children[rank]
            used = processor_seconds(child.process.pid)
            why = watched.watch.look(
                child.pulse.read(), now - watched.looked, used - watched.processor
            )
            watched.looked, watched.processor = now, used
            if why is not None and not self.ended:
                return child, why
        return None

    def computing(self) -> tuple[str, ...]:
        """Return the requests that its engine computes, or did when it died."""
        return self.children[0].pulse.computing() if self.children else ()


class CausesOfDeath:
    """Tells processes that failed from those that somebody has killed."""

    _FROM_OUTSIDE = frozenset(
        -number
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    )

    def __init__(self) -> None:
        self._out_of_memory = _out_of_memory_kills()

    def by_itself(self, status: int | None, killed: bool) -> bool:
        """Return whether a process ended by a fault of its own: also if it took too much memory.

        Args:
            status: its exit status, negative: the signal.
            killed: by us, because it had come to a standstill.
        """
        before, self._out_of_memory = self._out_of_memory, _out_of_memory_kills()
        if status == -signal.SIGKILL and not killed and self._out_of_memory > before:
            return True
        return not killed and status not in self._FROM_OUTSIDE


def _out_of_memory_kills() -> int:
    """Return how many processes this system has killed so far because memory ran out."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
