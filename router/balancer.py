"""Which replica a prompt goes to. A policy is pure: loads and question in, a choice out."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

from mii.proto.inference_pb2 import Prompt

_CHUNK: Final = 128  # characters or ids of a prompt that are remembered together
_CHUNKS: Final = 64  # of one prompt; more tell little
_REMEMBERED: Final = 100_000  # chunks of all prompts
# A prefix is worth its replica's queue unless that is longer than the shortest by so much.
_GUARD_FACTOR: Final = 2.0
_GUARD_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a policy may know of one replica that can answer."""

    number: int  # the replica's number in the deployment
    outstanding: int  # prompts that the router has sent it and that are not answered yet
    tokens: float = 0.0  # of those prompts, and of their answers that have not come: estimated
    weight: float = 1.0  # how much of the work it is to get, beside the others

    @property
    def relative(self) -> float:
        """Outstanding tokens in proportion to what the replica is to get."""
        return self.tokens / self.weight


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and why it was chosen."""

    number: int
    reason: str


class Policy(Protocol):
    """Chooses replicas, one prompt at a time; may remember its choices."""

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> Choice:
        """Choose the replica that is to answer `prompt`.

        `loads` is not empty, and its numbers ascend.
        """


class RoundRobin:
    """Each replica in its turn, as often as its weight says.

    The smooth form that nginx has: each turn adds a replica's weight to its credit, the largest
    credit is chosen and pays for all. Replicas that come and go skew nothing.
    """

    def __init__(self) -> None:
        self._credits: dict[int, float] = {}

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> Choice:
        """See `Policy.choose`."""
        self._credits = {
            load.number: self._credits.get(load.number, 0.0) + load.weight for load in loads
        }
        number = max(self._credits, key=lambda each: self._credits[each])
        self._credits[number] -= sum(load.weight for load in loads)
        return Choice(number, "round_robin")


class LeastOutstandingTokens:
    """The replica with the fewest tokens still to be computed, of prompts and answers."""

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> Choice:
        """See `Policy.choose`."""
        best = min(loads, key=lambda load: load.relative)
        return Choice(best.number, f"least_outstanding_tokens: {best.tokens:.0f}")


class PowerOfTwo:
    """The less loaded one of two that are drawn (Mitzenmacher, 1996).

    Where loads are known late, it does not send everything to the one that looked idle.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> Choice:
        """See `Policy.choose`."""
        drawn = self._rng.sample(loads, min(2, len(loads)))
        best = min(drawn, key=lambda load: load.relative)
        numbers = " and ".join(str(load.number) for load in drawn)
        return Choice(best.number, f"power_of_two: {best.tokens:.0f} tokens, of {numbers}")


class PrefixAffinity:
    """The replica that has seen most of the prompt's beginning, so that its cache can be used.

    Unless that one has far more to do than another: then, and for new prompts, the least loaded.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # chunks' hash chain: replica

    def choose(self, loads: Sequence[ReplicaLoad], prompt: Prompt) -> Choice:
        """See `Policy.choose`."""
        by_number = {load.number: load for load in loads}
        chain = prefix_chain(prompt)
        least = min(loads, key=lambda load: load.relative)
        chosen, reason = least, f"prefix_affinity: new, {least.tokens:.0f} tokens"
        known = [
            (depth, self._seen[key]) for depth, key in enumerate(chain, 1) if key in self._seen
        ]
        for depth, number in reversed(known):
            holder = by_number.get(number)
            if holder is None:
                continue
            if holder.relative <= _GUARD_FACTOR * least.relative + _GUARD_TOKENS:
                chosen, reason = holder, f"prefix_affinity: {depth} of {len(chain)} chunks"
            else:
                reason = f"prefix_affinity: replica {number} has the prefix and is overloaded"
            break
        for key in chain:
            self._seen[key] = chosen.number
            self._seen.move_to_end(key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return Choice(chosen.number, reason)


def prefix_chain(prompt: Prompt) -> list[bytes]:
    """Return a hash for each further chunk of a prompt, of the chunk and all before it."""
    content = prompt.WhichOneof("content")
    if content == "token_ids":
        ids = prompt.token_ids.ids
        parts = [
            str(list(ids[start : start + _CHUNK])) for start in range(0, len(ids), _CHUNK)[:_CHUNKS]
        ]
    else:
        text = prompt.chat.messages_json if content == "chat" else prompt.text
        parts = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)[:_CHUNKS]]
    chain, last = [], (content or "").encode()
    for part in parts:
        last = blake2b(last + part.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        chain.append(last)
    return chain


def stick_to_session(loads: Sequence[ReplicaLoad], session: str) -> Choice:
    """Return the replica that a session's requests go to, as long as it is there.

    Rendezvous hashing (Thaler and Ravishankar, 1998): when a replica goes, only its own sessions
    move; weights are kept.
    """

    def score(load: ReplicaLoad) -> float:
        digest = blake2b(f"{load.number} {session}".encode("utf-8", "replace"), digest_size=8)
        uniform = (int.from_bytes(digest.digest(), "little") + 1) / (2**64 + 1)
        return load.weight / -math.log(uniform)

    return Choice(max(loads, key=score).number, "session")


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "round_robin": RoundRobin,
    "least_outstanding_tokens": LeastOutstandingTokens,
    "prefix_affinity": PrefixAffinity,
    "power_of_two": PowerOfTwo,
}
