"""What a worker shows of its life, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.pulse import Beat, HangWatch, Pulse, processor_seconds


def test_the_requests_of_a_killed_process_can_still_be_read() -> None:
    pulse = Pulse.create()
    script = (
        "import os, sys, mii.pulse as p; pulse = p.Pulse(int(sys.argv[1]));"
        "pulse.tick(); pulse.begin_step(['a', 'bc']); pulse.end_step(0.5);"
        "pulse.begin_step(['bc', 'd']); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(pulse.descriptor)]
    subprocess.run(command, pass_fds=[pulse.descriptor], check=False)
    pulse.close_descriptor()
    assert pulse.computing() == ("bc", "d")
    assert pulse.read() == Beat(ticks=1, steps=3, busy=True, longest_step=0.5)
    pulse.rest()
    assert pulse.computing() == () and not pulse.read().busy


@given(st.lists(st.text("abcdef-0123", min_size=1, max_size=64), max_size=4000))
def test_what_finds_no_room_is_left_out(request_ids: list[str]) -> None:
    pulse = Pulse.create()
    pulse.begin_step(request_ids)
    told = pulse.computing()
    pulse.close_descriptor()
    assert list(told[:-1]) == request_ids[: len(told) - 1]
    assert len(told) == len(request_ids) or sum(map(len, told)) > 100_000


IDLE = Beat(ticks=7, steps=4, busy=False, longest_step=0.1)
BUSY = Beat(ticks=7, steps=4, busy=True, longest_step=0.1)


def looks(beats: list[Beat], processor: float = 0.0, seconds: float = 0.5) -> list[bool]:
    watch = HangWatch()
    return [watch.look(beat, seconds, processor) is not None for beat in beats]


def test_a_process_whose_loop_stands_still_hangs_after_two_seconds() -> None:
    assert looks([IDLE] * 6) == [False] * 4 + [True] * 2


def test_an_engine_that_has_work_and_does_not_step_hangs() -> None:
    ticking = [Beat(tick, 4, True, 0.1) for tick in range(6)]
    assert looks(ticking) == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "beats",
    [
        [Beat(tick, 4, False, 0.1) for tick in range(200)],  # idle
        [Beat(tick, tick, True, 0.1) for tick in range(200)],  # at work
        [Beat(tick // 3, tick, True, 0.1) for tick in range(200)],  # at work on a slow machine
    ],
)
def test_what_moves_does_not_hang(beats: list[Beat]) -> None:
    assert not any(looks(beats))


def test_a_long_step_that_uses_the_processor_is_given_time() -> None:
    computing = [Beat(tick, 4, True, 0.1) for tick in range(130)]
    hangs = looks(computing, processor=0.5)
    assert not any(hangs[:120]) and hangs[-1]


def test_steps_known_to_be_long_are_waited_for() -> None:
    assert not any(looks([Beat(tick, 4, True, 10.0) for tick in range(60)]))


def test_a_pause_of_the_watcher_itself_is_not_held_against_the_worker() -> None:
    assert looks([BUSY, BUSY], seconds=100.0) == [False, False]


def test_the_processor_time_of_this_process_grows() -> None:
    before = processor_seconds(os.getpid())
    while processor_seconds(os.getpid()) == before:
        sum(range(10**5))
    assert processor_seconds(2**22 + 1) == 0.0
