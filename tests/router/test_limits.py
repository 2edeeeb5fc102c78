"""Requests and tokens that are taken at most, and when to try again."""

from __future__ import annotations

from contextlib import ExitStack

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
    limit = RequestLimit(10, 1000, Speed(clock))
    with limit.admit(900) as admitted:
        clock.now += 2
        limit.progress(admitted, 800)  # 50 tokens a second
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


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1)), max_size=30))
def test_nothing_remains_counted(requests: list[tuple[float, float]]) -> None:
    limit = RequestLimit(100, 10**9)
    with ExitStack() as stack:
        for tokens, share in requests:
            limit.progress(stack.enter_context(limit.admit(tokens)), tokens * share)
    with limit.admit(1):
        pass
    assert limit._running == 0 and abs(limit._tokens) < 1e-3
