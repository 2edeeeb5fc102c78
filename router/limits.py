"""What the router takes at most. Beyond each bound the answer is an error at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mii.errors import Overloaded

MAX_CONCURRENT_REQUESTS: Final = 2048
MAX_PROMPTS_IN_FLIGHT: Final = 512  # of one request; the others wait in the router for their turn

_RETRY_AFTER = 1.0  # seconds


class RequestLimit:
    """Counts the requests that are being answered."""

    def __init__(self, bound: int = MAX_CONCURRENT_REQUESTS) -> None:
        self._bound = bound
        self._running = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request for as long as the block runs.

        Raises:
            Overloaded: if as many requests as allowed are running.
        """
        if self._running >= self._bound:
            raise Overloaded(
                f"the router is answering {self._running} requests, and takes no more than that: "
                "try again later",
                _RETRY_AFTER,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
