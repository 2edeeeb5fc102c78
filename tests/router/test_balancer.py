"""Policies, as pure functions of what they may know."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mii.proto.inference_pb2 import Prompt
from mii.router.balancer import ReplicaLoad, RoundRobin

PROMPT = Prompt(text="a")


def loads(*numbers: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(number, 0) for number in numbers]


@given(st.sets(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 5))
def test_round_robin_gives_everyone_the_same(numbers: set[int], rounds: int) -> None:
    policy = RoundRobin()
    ready = loads(*sorted(numbers))
    chosen = Counter(policy.choose(ready, PROMPT) for _ in range(rounds * len(numbers)))
    assert chosen == dict.fromkeys(numbers, rounds)


def test_round_robin_goes_on_where_it_was_when_a_replica_leaves() -> None:
    policy = RoundRobin()
    assert [policy.choose(loads(0, 1, 2), PROMPT) for _ in range(2)] == [0, 1]
    assert [policy.choose(loads(0, 2), PROMPT) for _ in range(3)] == [2, 0, 2]
    assert [policy.choose(loads(0, 1, 2), PROMPT) for _ in range(3)] == [0, 1, 2]
