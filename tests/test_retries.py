"""Requests that are sent again: nothing comes twice, nothing is asked for twice."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.errors import InvalidArgument, MIIError, Overloaded, Unavailable
from mii.messages import check_request, partial_answers, seed_of
from mii.proto.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PartialAnswer,
    Prompt,
    SamplingParams,
    SequenceDelta,
)
from mii.retries import Attempts, BrokenOff, Patience


def request_of(prompts: int, choices: int, *, stream: bool = True) -> GenerateRequest:
    return GenerateRequest(
        prompts=[Prompt(text=f"prompt {index}") for index in range(prompts)],
        sampling=SamplingParams(n=choices),
        stream=stream,
    )


def answer_to(prompt: str, choice: int, seed: int) -> list[int]:
    """What the server generates: a function of prompt, choice and seed."""
    base = sum(map(ord, prompt)) + 7 * choice + seed % 1000
    return [(base * (index + 3)) % 97 for index in range(1 + base % 6)]


def served(request: GenerateRequest) -> list[GenerateResponse]:
    """What a server sends, message by message."""
    check_request(request, "model")
    partial = partial_answers(request)
    messages = []
    for index, prompt in enumerate(request.prompts):
        seed = seed_of(request, index)
        assert seed is not None
        everything: dict[int, tuple[int, ...]] = {c: () for c in range(request.sampling.n)}
        for choice, have in (everything if partial is None else partial.get(index, {})).items():
            ids = answer_to(prompt.text, choice, seed)
            assert ids[: len(have)] == list(have) and len(have) < len(ids)
            new = ids[len(have) :]
            parts = [[each] for each in new] if request.stream else [new]
            for number, part in enumerate(parts):
                reason = "stop" if number == len(parts) - 1 else ""
                delta = SequenceDelta(
                    prompt_index=index, choice_index=choice, token_ids=part, finish_reason=reason
                )
                messages.append(GenerateResponse(deltas=[delta]))
    return messages


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(0, 12), max_size=6),
    st.sampled_from([None, 5]),
)
def test_however_often_it_breaks_off_each_token_comes_once(
    prompts: int, choices: int, stream: bool, breaks: list[int], seed: int | None
) -> None:
    request = request_of(prompts, choices, stream=stream)
    if seed is not None:
        request.sampling.seed = seed
    attempts = Attempts(request)
    got: dict[tuple[int, int], list[int]] = {}
    ids, seeds, numbers = set(), set(), []
    for after in [*breaks, 10**6]:
        sent = attempts.next_request()
        ids.add(sent.request_id)
        seeds.add(tuple(seed_of(sent, index) for index in range(prompts)))
        numbers.append(sent.attempt)
        for message in served(sent)[:after]:
            attempts.take(message)
            for delta in message.deltas:
                got.setdefault((delta.prompt_index, delta.choice_index), []).extend(delta.token_ids)
        if attempts.finished:
            break
    assert attempts.finished and len(ids) == 1 and len(seeds) == 1
    assert numbers == list(range(1, len(numbers) + 1))
    assert got == {
        (index, choice): answer_to(f"prompt {index}", choice, seed_of(request, index) or 0)
        for index in range(prompts)
        for choice in range(choices)
    }


def test_a_stream_that_goes_on_asks_only_for_what_is_missing() -> None:
    request = request_of(1, 1)
    request.sampling.seed = 5
    attempts = Attempts(request)
    first = served(attempts.next_request())
    attempts.take(first[0])
    (answer,) = attempts.next_request().resume
    assert list(answer.token_ids) == answer_to("prompt 0", 0, 5)[:1]


def test_prompts_without_a_seed_are_not_given_one_for_all() -> None:
    request = Attempts(request_of(3, 1)).next_request()
    assert len(set(request.seeds)) == 3 and not request.sampling.HasField("seed")


def resuming(*answers: tuple[int, int], seed: int | None = 1) -> GenerateRequest:
    request = request_of(2, 2)
    if seed is not None:
        request.sampling.seed = seed
    request.resume.extend(PartialAnswer(prompt_index=p, choice_index=c) for p, c in answers)
    return request


def seeded(*seeds: int) -> GenerateRequest:
    request = request_of(2, 1)
    request.seeds.extend(seeds)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (resuming((2, 0)), "resume"),
        (resuming((0, 2)), "resume"),
        (resuming((-1, 0)), "resume"),
        (resuming((0, 1), (1, 0), (0, 1)), "resume"),
        (resuming((0, 1), seed=None), "resume"),
        (seeded(1), "seeds"),
        (seeded(1, -1), "seeds"),
        (seeded(1, 2, 3), "seeds"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_by_name(
    request_: GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(request_, "model")
    assert caught.value.field == field and field in str(caught.value)


def test_patience_ends_with_the_deadline_or_its_own_end() -> None:
    error = Unavailable("gone")
    assert 0 < Patience(5.0, None).pause_after(error) <= 0.05
    for patience in (Patience(0.0, None), Patience(5.0, time.monotonic() + 0.001)):
        with pytest.raises(Unavailable):
            patience.pause_after(error)
    with pytest.raises(InvalidArgument):
        Patience(5.0, None).pause_after(InvalidArgument("no"))
    patience = Patience(1.0, None)
    pauses = [patience.pause_after(error) for _ in range(4)]
    assert pauses[-1] > pauses[0]
    patience.worked()
    assert patience.pause_after(error) <= 0.05


def pauses_of(patience: Patience, *errors: MIIError) -> list[float]:
    return [patience.pause_after(error) for error in errors]


def test_a_full_queue_is_waited_for_as_it_says_and_not_for_ever() -> None:
    full = Overloaded("full", 3.0)
    patience = Patience(30.0, None)
    assert all(3.0 <= pause <= 3.3 for pause in pauses_of(patience, full, full))
    with pytest.raises(Overloaded):
        patience.pause_after(full)
    for hopeless in (Overloaded("full"), Overloaded("full", 31.0)):
        with pytest.raises(Overloaded):
            Patience(30.0, None).pause_after(hopeless)


def test_a_full_queue_is_no_reason_to_give_up_what_was_under_way() -> None:
    full = Overloaded("full")
    assert len(pauses_of(Patience(30.0, None), Unavailable("gone"), full, full, full, full)) == 5


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def breaks_after(clock: Clock, patience: Patience, seconds: float, error: MIIError) -> None:
    clock.now += seconds
    clock.now += patience.pause_after(error)


def test_a_connection_that_lasted_and_breaks_off_is_a_new_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    broken, unreachable = BrokenOff("socket closed"), Unavailable("failed to connect")
    patience = Patience(10.0, None)
    for _ in range(4):  # a long answer of which nothing comes before its end
        breaks_after(clock, patience, 9.0, broken)
        breaks_after(clock, patience, 5.0, unreachable)
    with pytest.raises(Unavailable):
        breaks_after(clock, patience, 6.0, unreachable)


def test_a_connection_that_breaks_off_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, patience = Clock(monkeypatch), Patience(10.0, None)
    idle = BrokenOff("idle for a minute")
    for _ in range(8):
        breaks_after(clock, patience, 60.0, idle)
    with pytest.raises(BrokenOff):
        breaks_after(clock, patience, 60.0, idle)
