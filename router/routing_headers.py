"""Headers (HTTP) and metadata (gRPC) about where requests go, and how long they may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mii.errors import InvalidArgument
from mii.messages import MAX_NAME
from mii.router.balancer import Choice

# From the client: requests with the same value go to the same replica, while it is there.
SESSION_KEY: Final = "x-session-id"
# From the client, with any value: tell where the request went, and why.
EXPLAIN_KEY: Final = "x-mii-explain-route"
# To the client, when asked: "replica 1 (round_robin)", for each prompt and each move.
ROUTE_KEY: Final = "x-mii-route"

# From the client over HTTP, seconds: beyond it nobody waits for the answer.
TIMEOUT_KEY: Final = "x-request-timeout"

_LONGEST_TIMEOUT: Final = 1e9
_MOST_TOLD: Final = 16  # choices; more would make a header too long


def session_of(value: str | bytes) -> str:
    """Return a session's name.

    Raises:
        InvalidArgument: if it is too long.
    """
    if len(value) > MAX_NAME:
        raise InvalidArgument.of(SESSION_KEY, value, f"up to {MAX_NAME} characters")
    return value if isinstance(value, str) else value.decode("latin-1")


def timeout_of(asked: Mapping[str, str]) -> float | None:
    """Return the seconds after which nobody waits for the answer; None: there is no limit.

    Raises:
        InvalidArgument: for anything but a positive number.
    """
    value = asked.get(TIMEOUT_KEY)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < _LONGEST_TIMEOUT:
        raise InvalidArgument.of(TIMEOUT_KEY, value, "a positive number of seconds")
    return seconds


def explanation(asked: Mapping[str, str | bytes], choices: Sequence[Choice]) -> dict[str, str]:
    """Return the header that tells where a request went, if its own headers ask for that."""
    return {ROUTE_KEY: route_of(choices)} if EXPLAIN_KEY in asked else {}


def route_of(choices: Sequence[Choice]) -> str:
    """Put choices into words that are fit for a header."""
    told = [f"replica {choice.number} ({choice.reason})" for choice in choices[:_MOST_TOLD]]
    if len(choices) > _MOST_TOLD:
        told.append(f"{len(choices) - _MOST_TOLD} more")
    return ", ".join(told)
