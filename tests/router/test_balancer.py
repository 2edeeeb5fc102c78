"""Policies, as functions of what they may know."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.option_table import ROUTING_POLICIES
from mii.proto.inference_pb2 import Chat, Prompt, TokenIds
from mii.router.balancer import (
    POLICIES,
    LeastOutstandingTokens,
    PowerOfTwo,
    PrefixAffinity,
    ReplicaLoad,
    RoundRobin,
    prefix_chain,
    stick_to_session,
)

PROMPT = Prompt(text="a")


def loads(*numbers: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(number, 0) for number in numbers]


def with_tokens(*tokens: float, weights: tuple[float, ...] = ()) -> list[ReplicaLoad]:
    return [
        ReplicaLoad(number, 1, count, weights[number] if weights else 1.0)
        for number, count in enumerate(tokens)
    ]


def test_every_policy_can_be_asked_for_by_name() -> None:
    assert tuple(POLICIES) == ROUTING_POLICIES
    for name, policy in POLICIES.items():
        assert policy().choose(loads(3), PROMPT).reason.startswith(name)


@given(st.sets(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 5))
def test_round_robin_gives_everyone_the_same(numbers: set[int], rounds: int) -> None:
    policy = RoundRobin()
    ready = loads(*sorted(numbers))
    chosen = Counter(policy.choose(ready, PROMPT).number for _ in range(rounds * len(numbers)))
    assert chosen == dict.fromkeys(numbers, rounds)


def test_round_robin_goes_on_where_it_was_when_a_replica_leaves() -> None:
    policy = RoundRobin()

    def chosen(*numbers: int, times: int) -> list[int]:
        return [policy.choose(loads(*numbers), PROMPT).number for _ in range(times)]

    assert chosen(0, 1, 2, times=3) == [0, 1, 2]
    assert sorted(chosen(0, 2, times=4)) == [0, 0, 2, 2]
    assert sorted(chosen(0, 1, 2, times=6)) == [0, 0, 1, 1, 2, 2]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_round_robin_keeps_weights_exactly_and_spreads_them(weights: list[int]) -> None:
    policy = RoundRobin()
    ready = [ReplicaLoad(number, 0, 0.0, weight) for number, weight in enumerate(weights)]
    chosen = [policy.choose(ready, PROMPT).number for _ in range(2 * sum(weights))]
    for half in (chosen[: sum(weights)], chosen[sum(weights) :]):
        assert Counter(half) == dict(enumerate(weights))


def test_the_fewest_outstanding_tokens_in_proportion_to_the_weight_win() -> None:
    policy = LeastOutstandingTokens()
    assert policy.choose(with_tokens(500, 20, 90), PROMPT).number == 1
    assert policy.choose(with_tokens(500, 20, 90, weights=(100, 1, 1)), PROMPT).number == 0


def test_of_two_drawn_the_less_loaded_is_taken() -> None:
    policy = PowerOfTwo(random.Random(0))
    ready = with_tokens(0, 10, 20, 30)
    chosen = Counter(policy.choose(ready, PROMPT).number for _ in range(3000))
    assert chosen[3] == 0
    # Of the six pairs three have replica 0, two more have replica 1, one more replica 2.
    for number, pairs in ((0, 3), (1, 2), (2, 1)):
        assert chosen[number] == pytest.approx(500 * pairs, rel=0.2)
    assert policy.choose(with_tokens(7), PROMPT).number == 0


def test_prompts_that_begin_alike_go_to_the_same_replica() -> None:
    policy = PrefixAffinity()
    system = "You are a helpful assistant. " * 40
    first = policy.choose(with_tokens(5, 0, 9), Prompt(text=system + "one"))
    assert first.number == 1
    again = policy.choose(with_tokens(0, 1500, 0), Prompt(text=system + "two"))
    assert again.number == 1 and "chunks" in again.reason
    assert policy.choose(with_tokens(0, 1500, 9), Prompt(text="Another one")).number == 0


def test_a_prefix_is_not_worth_an_overloaded_replica_nor_one_that_is_gone() -> None:
    policy = PrefixAffinity()
    prompt = Prompt(text="x" * 1000)
    assert policy.choose(with_tokens(0, 0), prompt).number == 0
    moved = policy.choose(with_tokens(100_000, 0), prompt)
    assert moved.number == 1 and "overloaded" in moved.reason
    assert policy.choose([ReplicaLoad(0, 0), ReplicaLoad(2, 0)], prompt).number == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda part: Prompt(text="".join(chr(97 + i % 26) for i in part)),
        lambda part: Prompt(token_ids=TokenIds(ids=part)),
        lambda part: Prompt(chat=Chat(messages_json=str(part))),
    ],
    ids=["text", "ids", "chat"],
)
def test_a_longer_prompt_has_the_whole_chunks_of_a_shorter_one(make) -> None:  # type: ignore[no-untyped-def]
    short, long = prefix_chain(make(list(range(300)))), prefix_chain(make(list(range(900))))
    assert len(short) < len(long)
    assert short[:-1] == long[: len(short) - 1] and short[-1] not in long


def test_a_session_stays_and_only_the_sessions_of_a_lost_replica_move() -> None:
    sessions = [f"session {number}" for number in range(400)]
    before = {each: stick_to_session(loads(0, 1, 2, 3), each).number for each in sessions}
    assert all(70 < count < 130 for count in Counter(before.values()).values())
    after = {each: stick_to_session(loads(0, 1, 3), each).number for each in sessions}
    assert all(after[each] == number for each, number in before.items() if number != 2)
    weighted = with_tokens(0, 0, weights=(3, 1))
    counts = Counter(stick_to_session(weighted, each).number for each in sessions)
    assert counts[0] == pytest.approx(300, rel=0.15)
