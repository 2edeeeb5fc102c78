"""What the router takes at most. Beyond each bound the answer is an error at once."""

from __future__ import annotations

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


@dataclass
class Admitted:
    """One request that is being answered."""

    tokens: float  # still to be computed, estimated


class RequestLimit:
    """Counts the requests that are being answered, and what is still to be computed of them.

    Args:
        max_requests: at one time.
        max_tokens: of all their prompts and answers still to be computed, estimated.
        speed: measures how fast they are.
    """

    def __init__(self, max_requests: int, max_tokens: int, speed: Speed | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._speed = speed or Speed()
        self._running = 0
        self._tokens = 0.0

    @contextmanager
    def admit(self, tokens: float) -> Iterator[Admitted]:
        """Count one request for as long as the block runs.

        Args:
            tokens: of its prompts and answers, estimated.

        Raises:
            Overloaded: if as much as allowed is under way, with the time until there is room again.
        """
        if self._running >= self._max_requests:
            raise self._overloaded(
                f"the router is answering {self._running} requests, and takes no more than that",
                self._tokens / self._running,
            )
        # A request is never refused for its own size alone: the engine is the judge of that.
        if self._running and self._tokens + tokens > self._max_tokens:
            raise self._overloaded(
                f"{self._tokens:.0f} tokens are still to be computed and this request may take "
                f"{tokens:.0f} more, which makes more than {self._max_tokens} (max_queued_tokens)",
                self._tokens + tokens - self._max_tokens,
            )
        admitted = Admitted(tokens)
        self._running += 1
        self._tokens += tokens
        try:
            yield admitted
        finally:
            self._running -= 1
            self._tokens -= admitted.tokens

    def progress(self, admitted: Admitted, remaining: float) -> None:
        """Note what is still to be computed of a request."""
        computed = admitted.tokens - remaining
        admitted.tokens = remaining
        self._tokens -= computed
        self._speed.add(max(0.0, computed))

    def _overloaded(self, why: str, excess: float) -> Overloaded:
        """Return the error that says when so many tokens will have been computed."""
        speed = self._speed.per_second
        seconds = excess / speed if speed > 0 else _LEAST_RETRY
        seconds = min(max(seconds, _LEAST_RETRY), _LONGEST_RETRY)
        return Overloaded(f"{why}: try again in {seconds:.0f} seconds", seconds)
