"""What a worker shows of its life: a few counters in memory that it shares with its supervisor.

No message has to be sent or answered, so it also tells of a process that is stopped, hangs, or has
been killed in the middle of a step: which requests it was computing can still be read.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_SIZE: Final = 1 << 17
_HEAD: Final = 64  # bytes of the counters; the ids of the requests follow
_TICKS, _STEPS, _BUSY, _LONGEST, _LENGTH = range(5)  # the counters' places


@dataclass(frozen=True)
class Beat:
    """A look at a pulse."""

    ticks: int  # rises several times a second while the process's event loop runs
    steps: int  # rises with each step that the engine begins or ends
    busy: bool  # the engine has something to compute
    longest_step: float  # seconds, of those that have ended


class Pulse:
    """One worker's counters. The worker writes them, the supervisor reads them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._counters = memoryview(self._memory)[:_HEAD].cast("Q")

    @staticmethod
    def create() -> Pulse:
        """Return a new one; a child process inherits `descriptor`."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("mii-pulse", 0)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _SIZE)
        return Pulse(descriptor)

    def close_descriptor(self) -> None:
        """Close the descriptor, once it has been inherited; the memory stays."""
        os.close(self.descriptor)

    # The worker's side.

    def tick(self) -> None:
        """Say that the event loop runs."""
        self._counters[_TICKS] += 1

    def begin_step(self, request_ids: Sequence[str] | None) -> None:
        """Say what the engine computes now.

        Args:
            request_ids: what finds no room is left out; None: the same as in the last step.
        """
        if request_ids is not None:
            text = "\n".join(request_ids).encode()[: _SIZE - _HEAD]
            self._counters[_LENGTH] = 0
            self._memory[_HEAD : _HEAD + len(text)] = text
            self._counters[_LENGTH] = len(text)
        self._counters[_BUSY] = 1
        self._counters[_STEPS] += 1

    def end_step(self, seconds: float) -> None:
        """Say that a step has ended, and how long it took."""
        self._counters[_LONGEST] = max(self._counters[_LONGEST], int(seconds * 1e6))
        self._counters[_STEPS] += 1

    def rest(self) -> None:
        """Say that there is nothing to compute."""
        self._counters[_LENGTH] = 0
        self._counters[_BUSY] = 0

    # The supervisor's side.

    def read(self) -> Beat:
        """Return what it says now."""
        counters = self._counters
        return Beat(
            ticks=counters[_TICKS],
            steps=counters[_STEPS],
            busy=counters[_BUSY] != 0,
            longest_step=counters[_LONGEST] / 1e6,
        )

    def computing(self) -> tuple[str, ...]:
        """Return the ids of the requests that the engine computes, or did when it died."""
        length = self._counters[_LENGTH]
        text = bytes(self._memory[_HEAD : _HEAD + length]).decode("utf-8", "replace")
        return tuple(text.split("\n")) if text else ()


class HangWatch:
    """Judges, look by look, whether a worker that serves has come to a standstill.

    A process that uses no processor time and does not move hangs, or is stopped. One that does use
    it may be computing a long step: it is given longer.
    """

    IDLE_SECONDS: Final = 2.0
    BUSY_SECONDS: Final = 60.0
    LONGEST_LOOK: Final = 0.75  # seconds between two looks; what is longer was our own pause

    def __init__(self) -> None:
        self._last: Beat | None = None
        self._still = 0.0  # seconds of looks without a movement
        self._processor = 0.0  # seconds used meanwhile

    def look(self, beat: Beat, seconds: float, processor_seconds: float) -> str | None:
        """Return why the worker must be taken for hung, or None.

        Args:
            beat: what its pulse says now.
            seconds: since the last look.
            processor_seconds: processor time that the process used in that time.
        """
        last, self._last = self._last, beat
        moves = last is None or beat.ticks != last.ticks
        works = not beat.busy or last is None or beat.steps != last.steps
        if moves and works:
            self._still = self._processor = 0.0
            return None
        self._still += min(seconds, self.LONGEST_LOOK)
        self._processor += processor_seconds
        idle = self._processor < 0.02 * self._still
        if idle and self._still >= max(self.IDLE_SECONDS, 3 * beat.longest_step):
            what = "its engine has stood still" if moves else "the process has stood still"
            return f"{what} for {self._still:.1f} seconds and uses no processor time"
        if self._still >= max(self.BUSY_SECONDS, 5 * beat.longest_step):
            return f"it has not come to the end of a step for {self._still:.0f} seconds"
        return None


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far; 0.0 where that is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
