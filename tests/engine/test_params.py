"""Sampling parameters: what is accepted, what is refused and how, and what is filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.params import (
    ALIASES,
    MAX_CHOICES,
    PARAMETER_NAMES,
    Defaults,
    SamplingParams,
    check_params,
    check_token_ids,
    model_defaults,
    resolve_length,
    resolve_params,
)
from mii.errors import ContextLengthExceeded, InvalidArgument, UnknownArgument


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(50_000):
        value = [value]
    return value


AWKWARD: dict[str, Any] = {  # by name, for hypothesis prints what it draws from
    "huge": 10**5000,
    "huge below zero": -(10**5000),
    "above int32": 2**31,
    "above int64": 2**63,
    "huge float": 1e308,
    "zero below zero": -0.0,
    "lone surrogate": "\ud83d",
    "long": "x" * 5000,
    "unprintable": Unprintable(),
    "deep": deep(),
    "object": object(),
    "complex": 1j,
    "huge fraction": Fraction(10**400),
    "fraction": Fraction(1, 3),
    "numpy integer": np.int64(3),
    "numpy float": np.float32(0.5),
    "numpy array": np.array([1, 2]),
    "numpy truth": np.bool_(True),
    "range": range(3),
    "type": int,
}
AWKWARD_KEYS: dict[str, Any] = {"huge": 10**5000, "long": "9" * 5000, "square": "²", "none": None}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(list(AWKWARD)).map(lambda name: AWKWARD[name]),
)
KEYS = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.booleans(),
    st.sampled_from(list(AWKWARD_KEYS)).map(lambda name: AWKWARD_KEYS[name]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=6,
)
NAMES = st.one_of(st.sampled_from([*PARAMETER_NAMES, *ALIASES]), st.text(max_size=20), KEYS)


def resolved(values: dict[Any, Any]) -> SamplingParams | InvalidArgument:
    try:
        return resolve_params(check_params(values))
    except InvalidArgument as error:
        return error


@given(st.dictionaries(NAMES, ANYTHING, max_size=4))
@settings(max_examples=150, deadline=None)
def test_no_value_of_any_type_raises_anything_but_invalid_argument(values: dict[Any, Any]) -> None:
    params = resolved(values)
    if isinstance(params, InvalidArgument):
        assert str(params).isascii()
        assert len(str(params)) < 400
        assert params.field is None or params.field in values
        return
    assert 0 <= params.temperature <= 100
    assert 0 <= params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert 0 < params.repetition_penalty <= 100
    assert params.top_k >= 0
    assert 1 <= params.n <= MAX_CHOICES
    assert type(params.seed) in (int, type(None))
    assert all(stop.encode() for stop in params.stop)
    hash(params)


@given(st.sampled_from(PARAMETER_NAMES), ANYTHING)
@settings(max_examples=300, deadline=None)
def test_no_value_of_one_parameter_does_either(name: str, value: object) -> None:
    params = resolved({name: value})
    if isinstance(params, InvalidArgument):
        assert params.field == name
        assert name in str(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 999999),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.5"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", True),
        ("top_k", -5),
        ("top_k", 2**63),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("n", -1),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("min_new_tokens", -1),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", ["x" * 1025]),
        ("stop", "a\ud83d b"),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", {"0" * 25 + "5": 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", [5]),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("do_sample", "false"),
    ],
)
def test_values_out_of_range_or_type_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_params({name: value})
    assert refused.value.field == name
    assert name in str(refused.value)


def test_a_refusal_says_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(InvalidArgument, match=r"^top_p = 1.1 is not allowed: .* from 0 to 1$"):
        check_params({"top_p": 1.1})
    with pytest.raises(InvalidArgument, match="logit_bias has the key '-1': keys must be token"):
        check_params({"logit_bias": {"-1": 5}})
    with pytest.raises(InvalidArgument, match="logit_bias of token 5 is 1000: .* -100 to 100"):
        check_params({"logit_bias": {"5": 1000}})
    with pytest.raises(
        UnknownArgument, match=r"generate\(\) has no argument 'temprature'; did you"
    ):
        check_params({"temprature": 1})
    with pytest.raises(InvalidArgument, match="an argument whose name is 5"):
        check_params({5: 1})  # type: ignore[dict-item]


def test_huge_values_make_short_messages() -> None:
    for value in ("x" * 10**7, ["x" * 10**7] * 3, 10**5000, {"x" * 10**7: 1}, deep()):
        for name in ("temperature", "stop", "logit_bias"):
            with pytest.raises(InvalidArgument) as refused:
                check_params({name: value})
            assert len(str(refused.value)) < 300
    with pytest.raises(UnknownArgument) as unknown:
        check_params({"x" * 10**7: 1})
    assert len(str(unknown.value)) < 200


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5, "min_tokens": 2}, {"max_new_tokens": 5, "min_new_tokens": 2}),
        ({"temperature": None, "stop": None}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": np.float32(0.5), "top_k": np.int64(3)}, {"temperature": 0.5, "top_k": 3}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["a", "b", "a"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"stop": ["\x00"]}, {"stop": ("\x00",)}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"logit_bias": {"7": 1, 3: -100}}, {"logit_bias": ((3, -100.0), (7, 1.0))}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"stop_token_ids": [3, 3, 1]}, {"stop_token_ids": (3, 1)}),
    ],
)
def test_accepted_forms(given_: dict[str, object], expected: dict[str, object]) -> None:
    assert check_params(given_) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 5, "max_new_tokens": 5},
        {"max_new_tokens": 5, "max_tokens": 6},
        {"max_tokens": 5, "max_completion_tokens": 6},
    ],
)
def test_two_names_of_one_parameter_are_refused_in_any_order(values: dict[str, object]) -> None:
    first, second = values
    with pytest.raises(InvalidArgument, match=f"{first} and {second} are the same") as refused:
        check_params(values)
    assert refused.value.field == second


def test_a_minimum_above_the_maximum_is_refused_in_the_callers_words() -> None:
    with pytest.raises(InvalidArgument, match="min_tokens = 7 .* at most max_tokens, which is 5"):
        check_params({"max_tokens": 5, "min_tokens": 7})
    check_params({"max_tokens": 5, "min_tokens": 5})


# What is left out.


def test_defaults_are_deepspeed_miis_or_the_models() -> None:
    assert resolve_params({}) == SamplingParams(temperature=1.0, top_p=0.9)
    assert resolve_params({}, Defaults.MODEL) == SamplingParams()
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    of_model = resolve_params({}, Defaults.MODEL, model_defaults(config))
    assert of_model == replace(SamplingParams(), **config)
    assert resolve_params({}, Defaults.MII, model_defaults(config)).top_k == 0


def test_an_explicit_value_wins_over_the_models_default() -> None:
    defaults = model_defaults({"do_sample": True, "temperature": 0.01, "top_k": 1, "min_p": 0.1})
    checked = check_params({"temperature": 1, "top_k": 0, "min_p": 0})
    assert resolve_params(checked, Defaults.MODEL, defaults) == SamplingParams()
    assert resolve_params({"temperature": 0}, Defaults.MODEL, defaults).greedy


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": False, "temperature": 0.5}, {}),
        ({"temperature": None, "top_p": 0.8}, {"top_p": 0.8}),
        ({"temperature": -1, "top_k": 50}, {"top_k": 50}),
        ({"max_length": 20, "eos_token_id": [1, 2]}, {}),
    ],
)
def test_a_models_defaults(config: Mapping[str, object], expected: dict[str, object]) -> None:
    assert model_defaults(config) == expected


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({}, False),
        ({"do_sample": False}, True),
        ({"do_sample": False, "temperature": 0.7}, True),
        ({"do_sample": True, "temperature": 0}, True),
        ({"temperature": 0}, True),
        ({"temperature": 1e-7}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": -1}, False),
        ({"top_p": 0}, True),
        ({"top_p": 1}, False),
    ],
)
def test_what_counts_as_greedy(values: dict[str, object], greedy: bool) -> None:
    assert resolve_params(check_params(values)).greedy == greedy


def test_every_way_to_switch_top_k_off_is_the_same() -> None:
    off = {resolve_params(check_params(v)) for v in ({}, {"top_k": 0}, {"top_k": -1})}
    assert off == {resolve_params(check_params({"top_k": None}))}


# How long the answer may be.


@pytest.mark.parametrize(
    ("values", "prompt", "strict", "expected"),
    [
        ({}, 8, False, 92),
        ({}, 99, True, 1),
        ({"max_new_tokens": 5}, 8, True, 5),
        ({"max_new_tokens": 92}, 8, True, 92),
        ({"max_new_tokens": 96}, 8, False, 92),
        ({"max_length": 20}, 8, False, 12),
        ({"max_length": 20, "max_new_tokens": 50}, 8, False, 12),
        ({"max_length": 2000}, 8, False, 92),
    ],
)
def test_room_for_the_answer(
    values: dict[str, object], prompt: int, strict: bool, expected: int
) -> None:
    params = resolve_params(check_params(values))
    assert resolve_length(params, prompt, 100, strict=strict) == expected


@pytest.mark.parametrize(
    ("values", "prompt", "strict", "field", "numbers"),
    [
        ({}, 100, False, "prompt", ("100",)),
        ({}, 5000, True, "prompt", ("100", "5000")),
        ({"max_tokens": 96}, 8, True, "max_tokens", ("96", "100", "8", "92")),
        ({"max_length": 8}, 8, False, "max_length", ("8",)),
    ],
)
def test_what_cannot_fit_is_refused_with_the_true_numbers(
    values: dict[str, object], prompt: int, strict: bool, field: str, numbers: tuple[str, ...]
) -> None:
    params = resolve_params(check_params(values))
    with pytest.raises(ContextLengthExceeded) as refused:
        resolve_length(params, prompt, 100, strict=strict)
    assert refused.value.field == field
    assert all(number in str(refused.value) for number in numbers)


def test_token_ids_must_be_of_the_vocabulary() -> None:
    for values in ({"logit_bias": {"100": 1}}, {"stop_token_ids": [100]}):
        params = resolve_params(check_params(values))
        check_token_ids(params, 101)
        with pytest.raises(InvalidArgument, match="a token id from 0 to 99") as refused:
            check_token_ids(params, 100)
        assert refused.value.field == next(iter(values))
