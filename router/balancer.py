"""Which replica a prompt goes to. A policy is pure: loads and prompt in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mii.proto.inference_pb2 import Prompt


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a policy may know of one replica that can answer."""

    number: int  # the replica's number in the deployment
    outstanding: int  # prompts that the router has sent it and that are not answered yet


class Policy(Protocol):
    """Chooses replicas, one prompt at a time; may remember its choices."""

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> int:
        """Return the number of the replica that is to answer `prompt`.

        `loads` is not empty, and its numbers ascend.
        """


class RoundRobin:
    """Each replica in its turn, by number, so that replicas that come and go skew nothing."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> int:
        """Return the next number after the one returned last."""
        later = (load.number for load in loads if load.number > self._last)
        self._last = next(later, loads[0].number)
        return self._last
