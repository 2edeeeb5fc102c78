"""How long work on models says what it is doing."""

from __future__ import annotations

from collections.abc import Callable

# What is going on, for people; and the fraction that is done (0 to 1), None where it is not known.
Progress = Callable[[str, float | None], None]


def silent(activity: str, fraction: float | None) -> None:
    """A `Progress` for callers that do not care."""
