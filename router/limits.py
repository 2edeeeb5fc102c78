"""What the router takes at most. Beyond each bound the answer is an error at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from mii.errors import Overloaded

MAX_PROMPTS_IN_FLIGHT: Final = 512  # of one request; the others wait in the router for their turn

_LEAST_RETRY, _LONGEST_RETRY = 1.0, 300.0  # seconds
_SPEED_SECONDS: Final = 5.0  # of which the speed is an average, older ones counting less and less


class Speed:
    """Tokens per second of late, of prompts and answers: an average that forgets.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0.0  # with older ones counting less
        self._seconds = 0.0  # likewise
        self._last = clock()

    def add(self, tokens: float) -> None:
        """Count tokens that have been computed since the last call."""
        now = self._clock()
        elapsed, self._last = now - self._last, now
        kept = 0.5 ** (elapsed / _SPEED_SECONDS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed

    @property
    def per_second(self) -> float:
        """The speed; 0.0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


@dataclass(slots=True)
class _Load:
    """What is under way of one client, or of all."""

    speed: Speed
    requests: int = 0
    tokens: float = 0.0  # still to be computed, estimated

    def add(self, requests: int, tokens: float) -> None:
        self.requests += requests
        self.tokens += tokens


@dataclass(slots=True)
class Admitted:
    """One request that is being answered."""

    loads: tuple[_Load, ...]  # in which it counts
    tokens: float  # still to be computed, estimated
    most_counted: float  # of them

    @property
    def counted(self) -> float:
        """The tokens that the loads have of it."""
        return min(self.tokens, self.most_counted)


class RequestLimit:
    """Counts the requests that are being answered, and what is still to be computed of them.

    Clients share each bound by dynamic thresholds (Choudhury, Hahne 1998): one may hold as much as
    it leaves free, so that there is always room for a newcomer. One alone gets half of the bound,
    two get a third each, and so on. Requests of no client in particular may fill it.

    Args:
        max_requests: at one time.
        max_tokens: of all their prompts and answers still to be computed, estimated.
        clock: in seconds.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._all = _Load(Speed(clock))
        self._of: dict[str, _Load] = {}  # clients that have something under way

    @contextmanager
    def admit(self, tokens: float, client: str = "") -> Iterator[Admitted]:
        """Count one request for as long as the block runs.

        Args:
            tokens: of its prompts and answers, estimated.
            client: whose it is; "": of none in particular.

        Raises:
            Overloaded: if as much as allowed is under way, of all or of this client, with the time
                until there is room again.
        """
        most_counted = math.inf
        if client:  # whose largest request leaves room for others, too
            most_counted = self._max_tokens / 2
        self._check_all(min(tokens, most_counted))
        loads: tuple[_Load, ...] = (self._all,)
        if client:
            own = self._of.get(client) or _Load(Speed(self._clock))
            self._check_share(client, own, min(tokens, most_counted))
            self._of[client] = own
            loads = (self._all, own)
        admitted = Admitted(loads, tokens, most_counted)
        for load in loads:
            load.add(1, admitted.counted)
        try:
            yield admitted
        finally:
            for load in loads:
                load.add(-1, -admitted.counted)
            if client and not self._of[client].requests:
                del self._of[client]

    def progress(self, admitted: Admitted, computed: float) -> None:
        """Note that so many tokens of a request have been computed."""
        before = admitted.counted
        admitted.tokens -= computed
        for load in admitted.loads:
            load.add(0, admitted.counted - before)
            load.speed.add(max(0.0, computed))

    def _check_all(self, tokens: float) -> None:
        load = self._all
        if load.requests >= self._max_requests:
            raise self._overloaded(
                f"the router is answering {load.requests} requests, and takes no more than that",
                load.tokens / load.requests,
            )
        # A request is never refused for its own size alone: the engine is the judge of that.
        if load.requests and load.tokens + tokens > self._max_tokens:
            raise self._overloaded(
                f"{load.tokens:.0f} tokens are still to be computed and this request may take "
                f"{tokens:.0f} more, which makes more than {self._max_tokens} (max_queued_tokens)",
                load.tokens + tokens - self._max_tokens,
            )

    def _check_share(self, client: str, own: _Load, tokens: float) -> None:
        # What a client holds less makes the free part larger, too: half of an excess has to go.
        whose = f"the client of this key, {client!r},"
        excess = own.requests + 1 - (self._max_requests - self._all.requests - 1)
        if own.requests and excess > 0:
            raise self._overloaded(
                f"{whose} has {own.requests} requests under way, which is its share of the "
                f"{self._max_requests} (max_requests) that the router answers at one time; the "
                "rest is kept for other clients",
                math.ceil(excess / 2) * own.tokens / own.requests,
                own,
            )
        excess_tokens = own.tokens + tokens - (self._max_tokens - self._all.tokens - tokens)
        if own.requests and excess_tokens > 0:
            raise self._overloaded(
                f"{whose} has {own.tokens:.0f} tokens still to be computed and this request may "
                f"take {tokens:.0f} more, which is beyond its share of the {self._max_tokens} "
                "(max_queued_tokens); the rest is kept for other clients",
                excess_tokens / 2,
                own,
            )

    def _overloaded(self, why: str, excess: float, own: _Load | None = None) -> Overloaded:
        """Return the error that says when so many tokens, of all or its own, will be computed."""
        speed = own.speed.per_second if own is not None else 0.0
        speed = speed or self._all.speed.per_second
        seconds = excess / speed if speed > 0 else _LEAST_RETRY
        seconds = min(max(seconds, _LEAST_RETRY), _LONGEST_RETRY)
        return Overloaded(f"{why}: try again in {seconds:.0f} seconds", seconds)
