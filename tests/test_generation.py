"""What a user writes, as the request that is sent, or refused before anything is sent."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mii.errors import InternalError, InvalidArgument, UnknownArgument
from mii.generation import StreamedAnswer, WholeAnswers, check_timeout, generation_request
from mii.proto.inference_pb2 import GenerateRequest, GenerateResponse, SequenceDelta, Usage


def request(
    prompts: Any = None,
    prompt_token_ids: Any = None,
    messages: Any = None,
    stream: bool = False,
    **params: Any,
) -> GenerateRequest:
    return generation_request(prompts, prompt_token_ids, messages, params, stream=stream)


def ids_of(sent: GenerateRequest) -> list[list[int]]:
    return [list(prompt.token_ids.ids) for prompt in sent.prompts]


def test_one_prompt_is_a_list_of_one() -> None:
    assert [prompt.text for prompt in request("abc").prompts] == ["abc"]
    assert [prompt.text for prompt in request(("a", "b\0", "")).prompts] == ["a", "b\0", ""]


@pytest.mark.parametrize(
    "one", [[3, 0, 7], (3, 0, 7), np.array([3, 0, 7]), torch.tensor([3, 0, 7])]
)
def test_token_ids_come_in_lists_arrays_and_tensors(one: Any) -> None:
    assert ids_of(request(prompt_token_ids=one)) == [[3, 0, 7]]
    assert ids_of(request(prompt_token_ids=[one, [9]])) == [[3, 0, 7], [9]]


def test_an_array_of_two_dimensions_is_two_prompts() -> None:
    assert ids_of(request(prompt_token_ids=np.array([[1, 2], [3, 4]]))) == [[1, 2], [3, 4]]


def test_a_conversation_is_one_prompt_that_an_answer_follows() -> None:
    messages = [{"role": "user", "content": "hé"}]
    (prompt,) = request(messages=messages).prompts
    assert json.loads(prompt.chat.messages_json) == messages
    assert prompt.chat.add_generation_prompt


@given(st.text(st.characters()))  # lone surrogates among them
def test_any_string_is_sent(text: str) -> None:
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert request(text).prompts[0].text == expected


def test_absent_is_absent() -> None:
    assert not request("a").sampling.ListFields()
    assert not request("a", temperature=None, stop=None).sampling.ListFields()


def test_numbers_may_be_numpys_or_torchs() -> None:
    sampling = request(
        "a",
        max_new_tokens=np.int64(5),
        temperature=np.float64(0.5),
        top_p=torch.tensor(0.25),
        do_sample=np.bool_(False),
        seed=torch.tensor(2**40),
    ).sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.25)
    assert not sampling.do_sample and sampling.seed == 2**40


def test_lists_and_maps_are_sent_as_such() -> None:
    sampling = request("a", stop="x", stop_token_ids=[1, 2], logit_bias={"7": 1, 8: -0.5}).sampling
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x"], [1, 2])
    assert dict(sampling.logit_bias) == {7: 1.0, 8: -0.5}


def test_parameters_that_deepspeed_miis_server_overwrites_mean_nothing() -> None:
    assert request("a", prompt_length=5, stream=False) == request("a")
    assert request("a", stream=True).stream


HUGE = 10**400

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompts"),
    ({"prompts": "a", "prompt_token_ids": [1]}, "prompts"),
    ({"prompts": "a", "messages": [{"role": "user", "content": "a"}]}, "prompts"),
    ({"prompts": []}, "prompts"),
    ({"prompts": 5}, "prompts"),
    ({"prompts": b"abc"}, "prompts"),
    ({"prompts": {"a": 1}}, "prompts"),
    ({"prompts": ["a", None]}, "prompts[1]"),
    ({"prompts": [["a"]]}, "prompts[0]"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
    ({"prompt_token_ids": 5}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1], []]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, 2**31]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, [2]]}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1], 2]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [[1.5]]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": np.array(5)}, "prompt_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": object()}]}, "messages"),
    ({"prompts": ["a", "b"], "stream": True}, "prompts"),
    ({"prompts": "a", "stream": True, "n": 2}, "prompts"),
    ({"prompts": "a", "temperature": math.nan}, "temperature"),
    ({"prompts": "a", "temperature": np.float32("inf")}, "temperature"),
    ({"prompts": "a", "temperature": HUGE}, "temperature"),
    ({"prompts": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ({"prompts": "a", "max_new_tokens": HUGE}, "max_new_tokens"),
    ({"prompts": "a", "stop": ["x"] * 10_000}, "stop"),
    ({"prompts": "a", "stop": ["\ud800"]}, "stop"),
    ({"prompts": "a", "top_p": np.array([0.5, 0.6])}, "top_p"),
]


@pytest.mark.parametrize(("given_", "field"), REFUSED)
def test_what_cannot_be_is_refused_by_name(given_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        request(**given_)
    assert caught.value.field == field
    assert field in str(caught.value) and len(str(caught.value)) < 500


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UnknownArgument, match="did you mean 'max_new_tokens'"):
        request("a", max_new_token=5)


def test_asking_for_a_stream_where_none_can_be_says_how_to_get_one() -> None:
    with pytest.raises(InvalidArgument, match="client.stream") as caught:
        generation_request("a", None, None, {"stream": True}, stream=False)
    assert caught.value.field == "stream"


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5", True, [5]])
def test_a_timeout_that_is_none_is_refused(timeout: object) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        check_timeout(timeout)


def test_timeouts_are_seconds() -> None:
    assert check_timeout(None) is None
    assert check_timeout(5) == check_timeout(np.float32(5)) == 5.0
    assert check_timeout(math.inf) == check_timeout(HUGE) == 1e9


def delta(prompt: int, choice: int, text: str, tokens: int = 1) -> SequenceDelta:
    return SequenceDelta(
        prompt_index=prompt,
        choice_index=choice,
        text=text,
        token_ids=range(tokens),
        finish_reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=tokens),
    )


def test_answers_are_put_in_order_however_they_come() -> None:
    answers = WholeAnswers(request(["a", "b"], n=2))
    answers.add(GenerateResponse(deltas=[delta(1, 1, "b1"), delta(0, 0, "a0")]))
    answers.add(GenerateResponse(deltas=[delta(1, 0, "b0", tokens=5)]))
    with pytest.raises(InternalError, match="3 of 4"):
        answers.responses()
    answers.add(GenerateResponse(deltas=[delta(0, 1, "a1")]))
    responses = answers.responses()
    assert [str(response) for response in responses] == ["a0", "a1", "b0", "b1"]
    assert [response.generated_length for response in responses] == [1, 1, 5, 1]


def test_pieces_tell_how_long_the_answer_is_so_far() -> None:
    answer = StreamedAnswer()
    first = SequenceDelta(text="a", token_ids=[1, 2], usage=Usage(prompt_tokens=3))
    between = SequenceDelta(text="b", token_ids=[3])
    (a, b) = answer.pieces(GenerateResponse(deltas=[first, between]))
    assert (a.prompt_length, a.generated_length, a.finish_reason) == (3, 2, "none")
    assert (b.prompt_length, b.generated_length, b.token_ids) == (3, 3, [3])
    (last,) = answer.pieces(GenerateResponse(deltas=[delta(0, 0, "")]))
    assert (last.generated_length, last.finish_reason) == (4, "stop")
