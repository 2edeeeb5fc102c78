"""Requests that are sent again: nothing comes twice, nothing is asked for twice."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.errors import InvalidArgument, Unavailable
from mii.proto.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    Prompt,
    SamplingParams,
    SequenceDelta,
)
from mii.retries import Attempts, Patience


def request_of(prompts: int, choices: int, *, stream: bool = True) -> GenerateRequest:
    return GenerateRequest(
        prompts=[Prompt(text=f"prompt {index}") for index in range(prompts)],
        sampling=SamplingParams(n=choices),
        stream=stream,
    )


def answer_to(prompt: str, choice: int) -> list[int]:
    """What the server generates: a function of prompt and choice."""
    seed = sum(map(ord, prompt)) + 7 * choice
    return [(seed * (index + 3)) % 97 for index in range(1 + seed % 6)]


def served(request: GenerateRequest) -> list[GenerateResponse]:
    """What a server sends, message by message; it knows `resume` as ours does."""
    resumed = {answer.choice_index: list(answer.token_ids) for answer in request.resume}
    assert not resumed or (len(request.prompts) == 1 and request.sampling.HasField("seed"))
    messages = []
    for index, prompt in enumerate(request.prompts):
        for choice in resumed or range(request.sampling.n):
            ids = answer_to(prompt.text, choice)
            have = resumed.get(choice, [])
            assert ids[: len(have)] == have and len(have) < len(ids)
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
)
def test_however_often_it_breaks_off_each_token_comes_once(
    prompts: int, choices: int, stream: bool, breaks: list[int]
) -> None:
    if prompts > 1:
        stream = False  # as the clients do
    request = request_of(prompts, choices, stream=stream)
    attempts = Attempts(request)
    got: dict[tuple[int, int], list[int]] = {}
    ids = set()
    seeds = set()
    for after in [*breaks, 10**6]:
        sent = attempts.next_request()
        ids.add(sent.request_id)
        if prompts == 1:
            seeds.add(sent.sampling.seed)
        for message in served(sent)[:after]:
            for delta in attempts.take(message).deltas:
                got.setdefault((delta.prompt_index, delta.choice_index), []).extend(delta.token_ids)
        if attempts.finished:
            break
    assert attempts.finished and len(ids) == 1 and len(seeds) <= 1
    assert got == {
        (index, choice): answer_to(f"prompt {index}", choice)
        for index in range(prompts)
        for choice in range(choices)
    }


def test_a_stream_that_goes_on_asks_only_for_what_is_missing() -> None:
    attempts = Attempts(request_of(1, 1))
    first = served(attempts.next_request())
    attempts.take(first[0])
    (answer,) = attempts.next_request().resume
    assert list(answer.token_ids) == answer_to("prompt 0", 0)[:1]


def test_prompts_without_a_seed_are_not_given_one_for_all() -> None:
    assert Attempts(request_of(1, 1)).next_request().sampling.HasField("seed")
    assert not Attempts(request_of(2, 1)).next_request().sampling.HasField("seed")


def test_patience_ends_with_the_deadline_or_its_own_end() -> None:
    error = Unavailable("gone")
    assert 0 < Patience(5.0, None).pause_after(error) <= 0.05
    with pytest.raises(Unavailable):
        Patience(0.0, None).pause_after(error)
    with pytest.raises(Unavailable):
        Patience(5.0, time.monotonic() + 0.001).pause_after(error)
    with pytest.raises(InvalidArgument):
        Patience(5.0, None).pause_after(InvalidArgument("no"))
    patience = Patience(1.0, None)
    pauses = [patience.pause_after(error) for _ in range(4)]
    assert pauses[-1] > pauses[0]
    patience.worked()
    assert patience.pause_after(error) <= 0.05
