"""Requests and tokens that are taken at most, and when to try again."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.errors import Overloaded
from mii.router.limits import RequestLimit, Speed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_that_of_late() -> None:
    clock = Clock()
    speed = Speed(clock)
    assert speed.per_second == 0.0
    for per_step in (10, 50):
        for _ in range(500):
            clock.now += 0.1
            speed.add(per_step)
        assert speed.per_second == pytest.approx(10 * per_step, rel=0.01)
    clock.now += 1000  # idle
    speed.add(0)
    assert speed.per_second < 1


def test_the_hint_is_the_time_that_the_excess_takes() -> None:
    clock = Clock()
    limit = RequestLimit(10, 1000, clock)
    with limit.admit(900) as admitted:
        clock.now += 2
        limit.progress(admitted, 100)  # 50 tokens a second
        with pytest.raises(Overloaded, match="max_queued_tokens") as caught:
            limit.admit(700).__enter__()
        assert caught.value.retry_after == pytest.approx((800 + 700 - 1000) / 50)
        with limit.admit(100):
            pass


def test_requests_beyond_the_bound_are_refused() -> None:
    limit = RequestLimit(2, 10**6)
    with limit.admit(1), limit.admit(1), pytest.raises(Overloaded) as caught:
        limit.admit(1).__enter__()
    assert caught.value.retry_after == 1.0
    with limit.admit(1):
        pass


def test_a_large_request_alone_is_not_refused() -> None:
    with RequestLimit(2, 100).admit(1000):
        pass


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1), st.sampled_from(("", "a", "b"))), max_size=30
    )
)
def test_nothing_remains_counted(requests: list[tuple[float, float, str]]) -> None:
    limit = RequestLimit(100, 10**9)
    with ExitStack() as stack:
        for tokens, share, client in requests:
            with suppress(Overloaded):
                admitted = stack.enter_context(limit.admit(tokens, client))
                limit.progress(admitted, tokens * share)
    with limit.admit(1):
        pass
    assert limit._all.requests == 0 and abs(limit._all.tokens) < 1e-3
    assert not limit._of


sizes = st.one_of(st.integers(1, 20), st.integers(1, 400))
BOUND, TOKENS = 6, 1000


@given(st.lists(sizes, min_size=1, max_size=40), st.integers(1, TOKENS // 2))
def test_a_flood_of_one_client_leaves_room_for_another(flood: list[int], size: int) -> None:
    limit = RequestLimit(BOUND, TOKENS)
    with ExitStack() as stack:
        for tokens in flood:
            with suppress(Overloaded):
                stack.enter_context(limit.admit(tokens, "flood"))
        stack.enter_context(limit.admit(size, "other"))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), sizes, st.one_of(st.none(), st.integers(0, 20))),
        max_size=60,
    )
)
def test_who_holds_more_than_is_left_gets_nothing_further(
    requests: list[tuple[str, int, int | None]],
) -> None:
    limit = RequestLimit(BOUND, TOKENS)
    held: list[tuple[str, int, ExitStack]] = []
    for client, tokens, ends in requests:
        if ends is not None and held:
            held.pop(ends % len(held))[2].close()
        own = [size for owner, size, _ in held if owner == client]
        free = BOUND - len(held), TOKENS - sum(size for _, size, _ in held)
        fits = free[0] >= 1 and (free[1] >= tokens or not held)
        share = not own or (len(own) + 1 <= free[0] - 1 and sum(own) + tokens <= free[1] - tokens)
        if not (fits and share):
            with pytest.raises(Overloaded) as caught:
                limit.admit(tokens, client).__enter__()
            assert ("client" in str(caught.value)) == fits
            continue
        stack = ExitStack()
        stack.enter_context(limit.admit(tokens, client))
        held.append((client, tokens, stack))


@given(st.lists(sizes, max_size=40))
def test_without_clients_the_whole_bound_may_be_used(requests: list[int]) -> None:
    limit = RequestLimit(BOUND, TOKENS)
    count = total = 0
    with ExitStack() as stack:
        for tokens in requests:
            fits = count < BOUND and total + tokens <= TOKENS
            with suppress(Overloaded) if not fits else nullcontext():
                stack.enter_context(limit.admit(tokens))
                count, total = count + 1, total + tokens


def test_the_largest_request_of_a_client_leaves_room_for_others() -> None:
    limit = RequestLimit(BOUND, TOKENS)
    with limit.admit(10**9, "a") as admitted, limit.admit(TOKENS // 2, "b"):
        limit.progress(admitted, 10**9 - 100)
        with limit.admit(TOKENS // 4, "c"):
            pass


def test_a_client_is_told_when_its_own_work_will_have_made_room() -> None:
    clock = Clock()
    limit = RequestLimit(100, 1000, clock)
    with limit.admit(400, "slow") as slow, limit.admit(200, "quick") as quick:
        clock.now += 2
        limit.progress(slow, 20)  # 10 tokens a second
        limit.progress(quick, 180)
        with pytest.raises(Overloaded, match=r"'slow', has 380 .*max_queued_tokens") as caught:
            limit.admit(300, "slow").__enter__()
        # Each token of its 380 that is computed is one less held and one more free.
        assert caught.value.retry_after == pytest.approx((380 + 300 - (600 - 300)) / 2 / 10)
    limit = RequestLimit(4, 10**6, clock)
    with limit.admit(60, "a") as one, limit.admit(60, "a"):
        clock.now += 1
        limit.progress(one, 20)
        with pytest.raises(
            Overloaded, match=r"client of this key, 'a', has 2 .* 4 \(max_requests\)"
        ) as caught:
            limit.admit(1, "a").__enter__()
        assert caught.value.retry_after == pytest.approx(100 / 2 / 20)
