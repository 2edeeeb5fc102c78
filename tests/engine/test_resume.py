"""An answer that one engine has begun, gone on with by another: nothing is lost, nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.generator import Delta, Generator
from mii.engine.params import check_params
from mii.engine.prompts import GenerationRequest
from mii.errors import InvalidArgument
from tests.fakes import VOCAB, fake_generator


def requests_of(
    generator: Generator, params: dict[str, Any], resumed: dict[int, list[int]] | None = None
) -> list[GenerationRequest]:
    return generator.prompts.prepare(
        "prompt", check_params(params), request_id="r", resumed=resumed
    )


def run(generator: Generator, request: GenerationRequest) -> list[Delta]:
    generator.add(request)
    deltas = []
    while generator.has_work:
        deltas += generator.step()
    return deltas


@settings(max_examples=150, deadline=None)
@given(
    params=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(3, 24), "seed": st.integers(0, 2**63 - 1)},
        optional={
            # Hot enough for bytes that are no characters, and for the end of sequence.
            "temperature": st.sampled_from([0.0, 0.7, 5.0, 100.0]),
            "top_k": st.integers(1, 50),
            "repetition_penalty": st.sampled_from([1.3]),
            "frequency_penalty": st.sampled_from([0.8]),
            "min_new_tokens": st.integers(0, 3),
            "logprobs": st.integers(0, 3),
            "stop": st.lists(st.text("abc !0", min_size=1, max_size=2), max_size=3),
            "return_full_text": st.booleans(),
            "n": st.integers(1, 3),
        },
    ),
    cut=st.floats(0, 1, exclude_max=True),
    choice=st.integers(0, 2),
)
def test_the_rest_is_what_it_would_have_been(
    params: dict[str, Any], cut: float, choice: int
) -> None:
    choice %= params.get("n", 1)
    whole = run(fake_generator(), requests_of(fake_generator(), params)[choice])
    begun = whole[: int(cut * len(whole))]
    known = [i for delta in begun for i in delta.token_ids]

    other = fake_generator()
    (request,) = requests_of(other, params, {choice: known})
    rest = run(other, request)
    assert [d.token_ids for d in begun + rest] == [d.token_ids for d in whole]
    assert "".join(d.text for d in begun + rest) == "".join(d.text for d in whole)
    assert [d.logprobs for d in begun + rest] == [d.logprobs for d in whole]
    last, expected = rest[-1], whole[-1]
    assert (last.finish_reason, last.stop_match) == (expected.finish_reason, expected.stop_match)
    assert last.usage is not None and expected.usage is not None
    assert last.usage.completion_tokens == expected.usage.completion_tokens
    assert last.usage.prompt_tokens == expected.usage.prompt_tokens


def test_a_resumed_answer_outlives_preemption() -> None:
    params = {"max_new_tokens": 40, "temperature": 0.7, "seed": 1}
    whole = run(fake_generator(), requests_of(fake_generator(), params)[0])
    tight = fake_generator(num_blocks=14)  # of 4 tokens: not enough for two such answers
    known = [i for delta in whole[:9] for i in delta.token_ids]
    (request,) = requests_of(tight, params, {0: known})
    first = tight.add(request)
    tight.add(replace(request, answer_ids=()))
    deltas: list[Delta] = []
    while tight.has_work:
        deltas += tight.step()
    assert tight.stats().preemptions > 0
    rest = [i for delta in deltas if delta.handle == first for i in delta.token_ids]
    assert known + rest == [i for delta in whole for i in delta.token_ids]


@pytest.mark.parametrize(
    ("resumed", "field"),
    [
        ({1: [5]}, "resume.choice_index"),
        ({-1: [5]}, "resume.choice_index"),
        ({0: [VOCAB]}, "resume.token_ids"),
        ({0: [-1]}, "resume.token_ids"),
        ({0: [5, 6, 7, 8]}, "resume.token_ids"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(resumed: dict[int, list[int]], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        requests_of(fake_generator(), {"max_new_tokens": 4}, resumed)
    assert caught.value.field == field
