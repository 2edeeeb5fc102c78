"""The router as its supervisor sees it: where it listens, and when it is started again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final

from mii.config import DeploymentConfig
from mii.control import Message, Ready
from mii.launchers.local import Child
from mii.pulse import HangWatch, processor_seconds

# A router that has served for so long did not die of its start: the count begins anew.
_STABLE_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.1  # seconds until it is started again; clients wait for it
_LONGEST_PAUSE: Final = 10.0


@dataclass(eq=False)
class SupervisedRouter:
    """The router's process and what is known of it.

    Args:
        config: the deployment's.
    """

    config: DeploymentConfig
    child: Child | None = field(default=None, init=False)
    ready: Ready | None = field(default=None, init=False)  # as it said last, in any of its lives
    restart_at: float | None = field(default=None, init=False)  # time.monotonic()
    _serves_since: float | None = field(default=None, init=False)
    _deaths: int = field(default=0, init=False)  # in a row
    _watch: HangWatch = field(default_factory=HangWatch, init=False)
    _looked: float = field(default=0.0, init=False)
    _processor: float = field(default=0.0, init=False)

    @property
    def config_to_start(self) -> DeploymentConfig:
        """What to start it with: the ports that clients know, once there are any."""
        if self.ready is None:
            return self.config
        return replace(
            self.config,
            port=self.ready.port,
            port_is_default=False,
            rest_port=self.ready.rest_port or self.config.rest_port,
            rest_port_is_default=False,
        )

    def begin(self, child: Child) -> None:
        """Take on the process of a new start."""
        self.child = child
        self.restart_at = self._serves_since = None

    def serves(self, message: Ready) -> None:
        """Note that it listens."""
        assert self.child is not None
        self.ready = message
        self._serves_since = self._looked = time.monotonic()
        self._processor = processor_seconds(self.child.process.pid)
        self._watch = HangWatch()

    def died(self, *, as_asked: bool) -> bool:
        """Note its end; return whether it is to be started again, at `restart_at`.

        Args:
            as_asked: it ended in an orderly way.
        """
        if self.ready is None:
            return False  # it has never served: the start has failed
        now = time.monotonic()
        stable = self._serves_since is not None and now - self._serves_since >= _STABLE_SECONDS
        self._deaths = 0 if stable or as_asked else self._deaths + 1
        if self._deaths > self.config.max_restarts:
            return False
        pause = 0.0 if as_asked else _FIRST_PAUSE * 2 ** (max(1, self._deaths) - 1)
        self._serves_since = None
        self.restart_at = now + min(pause, _LONGEST_PAUSE)
        return True

    def standstill(self) -> str | None:
        """Return the signs that it hangs, or None."""
        if self._serves_since is None or self.child is None:
            return None
        now = time.monotonic()
        used = processor_seconds(self.child.process.pid)
        beat = self.child.pulse.read()
        why = self._watch.look(beat, now - self._looked, used - self._processor)
        self._looked, self._processor = now, used
        return why

    def tell(self, message: Message) -> None:
        """Send it a message; while it is down, nothing is sent."""
        if self.child is not None:
            self.child.channel.send(message)
