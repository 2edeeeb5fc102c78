"""What can happen to a deployment: all that its supervisor decides upon, in one queue."""

from __future__ import annotations

from dataclasses import dataclass

from mii.control import Message
from mii.launchers.local import Child


@dataclass(frozen=True)
class Said:
    """A child sent a message."""

    child: Child
    message: Message


@dataclass(frozen=True)
class Ended:
    """A child's process has ended."""

    child: Child


@dataclass(frozen=True)
class StarterSaid:
    """The process that started the deployment sent a message."""

    message: Message


@dataclass(frozen=True)
class StarterGone:
    """The process that started the deployment has closed its end."""


@dataclass(frozen=True)
class Signalled:
    """SIGTERM or SIGINT."""

    number: int


@dataclass(frozen=True)
class TimeToLook:
    """Nothing has happened for a while."""


Event = Said | Ended | StarterSaid | StarterGone | Signalled | TimeToLook
