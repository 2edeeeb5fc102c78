"""Guided decoding: whatever the model would say, the answer keeps to its grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.generator import Generator
from mii.engine.grammar import GrammarCompiler, Guide
from mii.engine.params import SamplingParams, check_params
from mii.engine.sampler import Sampler, SamplingState
from mii.errors import InvalidArgument
from mii.models.tokenizer import TokenizerLike, load_tokenizer
from tests.fakes import EOS, VOCAB, ByteTokenizer, fake_generator

COMPILER = GrammarCompiler(ByteTokenizer(), VOCAB)


def state_of(seed: int = 0, compiler: GrammarCompiler = COMPILER, **params: Any) -> SamplingState:
    checked = SamplingParams(**check_params(params))
    guide = Guide.of(checked)
    assert guide is not None
    return SamplingState(checked, seed=seed, stop_ids={EOS}, grammar=compiler.compile(guide))


def answer_of(
    state: SamplingState, rng: np.random.Generator, vocab: int = VOCAB, most: int = 2000
) -> list[int]:
    """What a model that knows nothing answers, its end left out."""
    ids: list[int] = []
    while len(ids) < most:
        logits = torch.from_numpy(rng.normal(0, 3, vocab).astype(np.float32))
        (token,), _ = Sampler(vocab).sample(logits[None], [state])
        assert not state.failure
        state.append(token)
        if token == EOS:
            return ids
        ids.append(token)
    return ids


REGEXES = [
    r"[a-z]+@[a-z]{2,8}\.(com|org)",
    r"(yes|no|maybe)( indeed)?",
    r"\d{4}-(0[1-9]|1[0-2])-\d{2}",
    r"(ab|a)*c",
    r"[\x20-\x7e]{10,20}!",
    "\u4f60\u597d|\u0645\u0631\u062d\u0628\u0627|\U0001f600{2}",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("seed", range(5))
def test_answers_match_their_regex(regex: str, seed: int) -> None:
    ids = answer_of(state_of(seed, guided_regex=regex), np.random.default_rng(seed))
    text = bytes(ids).decode()
    assert re.fullmatch(regex, text), text


def test_answers_are_one_of_the_choices_and_each_may_come() -> None:
    choices = ["red", "redder", 'say "hi"\n', "\u7ea2\u8272", "a|b", "x" * 50]
    seen = set()
    for seed in range(60):
        ids = answer_of(state_of(seed, guided_choice=choices), np.random.default_rng(seed))
        seen.add(bytes(ids).decode())
    assert seen <= set(choices) and len(seen) >= 4, seen


def test_answers_are_sentences_of_their_grammar() -> None:
    grammar = 'start: "(" start ")" | NUMBER\nNUMBER: /[1-9][0-9]{0,3}/'
    for seed in range(10):
        ids = answer_of(state_of(seed, guided_grammar=grammar), np.random.default_rng(seed))
        inner = bytes(ids).decode()
        while inner.startswith("("):
            assert inner.endswith(")")
            inner = inner[1:-1]
        assert re.fullmatch("[1-9][0-9]{0,3}", inner)


def some_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of the kinds that people write."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (3 if depth < 2 else 0))
    match kind:
        case "object":
            names = rng.sample(["a", "b", "name", "age", "\u00e9t\u00e9", "x y"], rng.randint(1, 4))
            required = rng.sample(names, rng.randint(0, len(names)))
            return {
                "type": "object",
                "properties": {name: some_schema(rng, depth + 1) for name in names},
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            low = rng.randint(0, 2)
            items = some_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [some_schema(rng, depth + 1) for _ in range(2)]}
        case "enum":
            return {"enum": rng.sample(["a", 1, None, True, "b c", 2.5], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 7, None])}
        case "pattern":
            return {"type": "string", "pattern": "^[a-c]{1,5}$"}
        case "string":
            return {"type": "string", "maxLength": rng.randint(1, 20)}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 1000)}
        case _:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(60))
def test_answers_are_valid_under_their_json_schema(seed: int) -> None:
    schema = some_schema(random.Random(seed))
    ids = answer_of(state_of(seed, guided_json=schema), np.random.default_rng(seed))
    if len(ids) < 2000:  # a string without a limit may go on for ever
        jsonschema.validate(json.loads(bytes(ids).decode()), schema)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(REGEXES), st.integers(0, 1000), st.integers(0, 30))
def test_replay_gives_the_same_further_tokens(regex: str, seed: int, at: int) -> None:
    whole = answer_of(state_of(seed, guided_regex=regex), np.random.default_rng(seed))
    at = min(at, len(whole))
    resumed = state_of(seed, guided_regex=regex)
    answer_of(resumed, np.random.default_rng(seed + 1), most=7)  # of another life
    resumed.replay(whole[:at])
    rng = np.random.default_rng(seed)
    rng.normal(0, 3, (at, VOCAB))
    assert whole[:at] + answer_of(resumed, rng) == whole


def test_answers_of_one_guide_do_not_share_a_state() -> None:
    first, second = (state_of(seed, guided_choice=["ab", "cd"]) for seed in (1, 2))
    first.append(ord("a"))
    logits = np.zeros(VOCAB, dtype=np.float32)
    assert np.isfinite(first.adjust(logits)).nonzero()[0].tolist() == [ord("b")]
    assert np.isfinite(second.adjust(logits)).nonzero()[0].tolist() == [ord("a"), ord("c")]


def test_an_answer_that_must_end_ends_before_its_minimum_length() -> None:
    state = state_of(guided_choice=["a"], min_new_tokens=5)
    assert answer_of(state, np.random.default_rng(0)) == [ord("a")]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "(?=x)"}, "look-around"),
        ({"guided_grammar": "this is no grammar"}, "guided_grammar"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
        ({"guided_regex": "a" * 40_000}, "at most 32768"),
        ({"guided_json": '{"type":"array","items":' * 3000 + "{}" + "}" * 3000}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 2_000_000]}}, "at most 1048576"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        state_of(**params)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "params",
    [
        {"guided_json": "{"},
        {"guided_json": 5},
        {"guided_json": {"a": {1, 2}}},
        {"guided_regex": ""},
        {"guided_regex": ["a"]},
        {"guided_choice": []},
        {"guided_choice": ["a", ""]},
        {"guided_choice": "abc"},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
)
def test_parameters_of_the_wrong_type_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="guided_"):
        check_params(params)


def run(generator: Generator, count: int = 1, **params: Any) -> list[Any]:
    """Return the text and finish reason of each answer, or why it failed."""
    requests = generator.prompts.prepare(
        "say:", check_params({"n": count, **params}), request_id="r"
    )
    handles = [generator.add(request) for request in requests]
    texts: dict[int, str] = dict.fromkeys(handles, "")
    ends: dict[int, str] = {}
    while generator.has_work:
        for delta in generator.step():
            texts[delta.handle] += delta.text
            if delta.finish_reason or delta.failure:
                ends[delta.handle] = delta.failure or str(delta.finish_reason)
    return [(texts[handle], ends[handle]) for handle in handles]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_engine_ends_an_answer_where_its_grammar_does(ignore_eos: bool) -> None:
    params = {"temperature": 0, "ignore_eos": ignore_eos}
    assert run(fake_generator(), guided_choice=["fine"], **params) == [("fine", "stop")]
    assert run(fake_generator(), guided_regex="x{50}", max_new_tokens=9, **params) == [
        ("x" * 9, "length")
    ]


def test_answers_beside_each_other_keep_to_their_own_grammar() -> None:
    answers = run(fake_generator(), count=6, guided_regex="[a-f]{3}(0|1){5}", seed=3)
    assert all(re.fullmatch("[a-f]{3}[01]{5}", text) for text, _ in answers)
    assert len(set(answers)) > 1


def test_a_grammar_that_meets_a_limit_on_its_way_fails_its_own_answer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = fake_generator()
    checked = check_params({"guided_regex": "[a-z]{5}", "temperature": 0})
    (request,) = generator.prompts.prepare("say:", checked, request_id="r")
    (other,) = generator.prompts.prepare(
        "say:", check_params({"temperature": 0, "max_new_tokens": 9}), request_id="s"
    )
    handles = generator.add(request), generator.add(other)
    sampling = generator._sequences[handles[0]].sampling
    sampling.append(ord("!"))  # which the grammar does not allow: it is lost from here on
    ends: dict[int, tuple[str, str | None]] = {}
    while generator.has_work:
        for delta in generator.step():
            if delta.finish_reason or delta.failure:
                ends[delta.handle] = delta.failure, delta.finish_reason
    assert ends[handles[0]][0] and ends[handles[1]] == ("", "length")
    stats = generator.stats()
    assert stats.free_blocks == stats.total_blocks


def test_tokens_of_several_bytes_are_followed(smollm2: Any) -> None:
    tokenizer: TokenizerLike = load_tokenizer(smollm2)
    vocab = 49152
    compiler = GrammarCompiler(tokenizer, vocab)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    checked = SamplingParams(**check_params({"guided_json": schema}))
    guide = Guide.of(checked)
    assert guide is not None
    grammar = compiler.compile(guide)
    ends = tokenizer.eos_token_ids
    for seed in range(3):
        rng = np.random.default_rng(seed)
        state = SamplingState(checked, seed=seed, stop_ids=ends, grammar=grammar)
        ids: list[int] = []
        while not ids or ids[-1] not in ends:
            logits = torch.from_numpy(rng.normal(0, 3, vocab).astype(np.float32))
            (token,), _ = Sampler(vocab).sample(logits[None], [state])
            state.append(token)
            ids.append(token)
        jsonschema.validate(json.loads(_text(tokenizer, ids[:-1])), schema)


def _text(tokenizer: TokenizerLike, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()
