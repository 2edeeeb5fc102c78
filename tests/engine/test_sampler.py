"""The sampler: each row by its own request's parameters and state, and by nothing else."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from mii.engine.params import SamplingParams
from mii.engine.sampler import LEAST_LOGPROB, Sampler, SamplingState, TokenCounts

VOCAB = 300
EOS = 2
GREEDY = SamplingParams(temperature=0.0)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.5 * torch.randn(rows, vocab, generator=generator)


def state_of(seed: int = 1, *, prompt: tuple[int, ...] = (), **params: Any) -> SamplingState:
    stop_ids = {EOS, *params.get("stop_token_ids", ())}
    return SamplingState(SamplingParams(**params), seed=seed, prompt_ids=prompt, stop_ids=stop_ids)


def sample_one(logits: torch.Tensor, state: SamplingState) -> int:
    tokens, _ = Sampler().sample(logits[None], [state])
    return tokens[0]


ALL_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5, "prompt": (1, 2, 3)},
    {"temperature": 0.0, "repetition_penalty": 1.3, "prompt": (5, 5, 5)},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": ((7, 20.0), (8, -100.0))},
    {"min_new_tokens": 5, "stop_token_ids": (9,)},
    {"top_p": 0.5, "logprobs": 3},
]


def answers(states: list[SamplingState], steps: int) -> list[list[int]]:
    """What the states make of a made-up model, whose logits follow from row and position."""
    sampler = Sampler(VOCAB)
    ids: list[list[int]] = [[] for _ in states]
    for step in range(steps):
        logits = torch.stack([some_logits(1, 1000 * state.seed + step)[0] for state in states])
        tokens, _ = sampler.sample(logits, states)
        for state, row, token in zip(states, ids, tokens, strict=True):
            state.append(token)
            row.append(token)
    return ids


def test_each_request_gets_in_a_batch_what_it_gets_alone_in_any_order() -> None:
    def states() -> list[SamplingState]:
        return [state_of(seed, **kind) for seed, kind in enumerate(ALL_KINDS)]

    together = answers(states(), 12)
    assert together == [answers([state], 12)[0] for state in states()]
    assert together == answers(states()[::-1], 12)[::-1]


@given(st.sampled_from(ALL_KINDS), st.integers(0, 2**63 - 1), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_replayed_state_goes_on_as_the_one_it_replaces(
    kind: dict[str, Any], seed: int, cut: int
) -> None:
    whole = answers([state_of(seed % 50, **kind)], 10)[0]
    state = state_of(seed % 50, **kind)
    state.append(17)  # what a state has seen before it is replayed does not count
    state.replay(whole[:cut])
    for step in range(cut, 10):
        token = sample_one(some_logits(1, 1000 * state.seed + step)[0], state)
        assert token == whole[step]
        state.append(token)


def test_choices_of_one_seed_differ_and_come_again() -> None:
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(4, 50_000)

    def draw() -> list[int]:
        states = [SamplingState(params, seed=5, choice=choice) for choice in range(4)]
        return Sampler().sample(flat, states)[0]

    assert len(set(draw())) == 4
    assert draw() == draw()


def test_the_same_seed_in_another_request_gives_the_same_tokens() -> None:
    logits = torch.zeros(3, 50_000)
    tokens, _ = Sampler().sample(logits, [state_of(9), state_of(10), state_of(9)])
    assert tokens[0] == tokens[2] != tokens[1]


# Greedy.


def test_greedy_is_the_first_of_the_greatest() -> None:
    logits = some_logits(6)
    logits[3, [40, 250]] = 99.0
    tokens, logprobs = Sampler().sample(logits, [state_of(temperature=0.0)] * 6)
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[3] == 40
    assert logprobs == {}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}])
def test_what_keeps_one_token_is_greedy_among_ties_too(params: dict[str, Any]) -> None:
    logits = some_logits(1)[0]
    logits[[40, 250]] = 99.0
    assert {sample_one(logits, state_of(seed, **params)) for seed in range(20)} == {40}


# What comes before the filters.


@given(st.lists(st.integers(0, 19), max_size=12), st.lists(st.integers(0, 19), max_size=12))
@settings(max_examples=100, deadline=None)
def test_penalties_bias_and_minimum_length_in_transformers_order(
    prompt: list[int], answer: list[int]
) -> None:
    """The whole chain, against transformers where it has the step, and a formula where not."""
    biases = ((3, 2.5), (EOS, 50.0), (11, -100.0))
    state = SamplingState(
        SamplingParams(
            repetition_penalty=1.7,
            presence_penalty=0.6,
            frequency_penalty=-0.3,
            logit_bias=biases,
            min_new_tokens=6,
        ),
        seed=0,
        prompt_ids=prompt,
        stop_ids={EOS, 9},
    )
    state.replay(answer)
    row = some_logits(1, 4, 20)[0]
    expected = row[None].clone()
    ids = torch.tensor([[*prompt, *answer]], dtype=torch.long)
    if ids.numel():
        expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)
    for token, count in Counter(answer).items():
        expected[0, token] -= 0.6 - 0.3 * count
    for token, bias in biases:
        expected[0, token] += bias
    minimum = MinNewTokensLengthLogitsProcessor(len(prompt), 6, [EOS, 9])
    expected = minimum(ids, expected)
    adjusted = state.adjust(row.numpy())
    np.testing.assert_allclose(adjusted, expected[0].numpy(), rtol=1e-5, atol=1e-5)


def test_prompt_tokens_count_for_the_repetition_penalty_alone() -> None:
    row = np.full(5, 4.0, dtype=np.float32)
    states = [
        state_of(prompt=(1, 1, 1), presence_penalty=2.0),
        state_of(prompt=(1, 1, 1), frequency_penalty=2.0),
        state_of(prompt=(1, 1, 1), repetition_penalty=2.0),
    ]
    assert [state.adjust(row)[1] for state in states] == [4.0, 4.0, 2.0]
    for state in states:
        state.replay([1, 1])
    assert [state.adjust(row)[1] for state in states] == [2.0, 0.0, 2.0]


def test_minimum_length_masks_every_way_to_stop_and_counts_new_tokens_only() -> None:
    logits = some_logits(1)[0]
    logits[[EOS, 9, 10]] = torch.tensor([99.0, 98.0, 97.0])
    state = state_of(
        temperature=0.0, min_new_tokens=2, stop_token_ids=(9,), prompt=tuple(range(40))
    )
    tokens = []
    for _ in range(3):
        tokens.append(sample_one(logits, state))
        state.append(tokens[-1])
    assert tokens == [10, 10, EOS]


def test_without_stop_ids_nothing_is_masked() -> None:
    """A request that ignores EOS has no stop ids: the end may be sampled, and goes on."""
    logits = some_logits(1)[0]
    logits[EOS] = 99.0
    state = SamplingState(replace(GREEDY, min_new_tokens=5), seed=0, stop_ids=())
    assert sample_one(logits, state) == EOS
    logits[VOCAB - 1] = 100.0
    assert sample_one(logits, state) == VOCAB - 1


def test_rows_with_nothing_to_adjust_are_not_copied_and_logits_never_change() -> None:
    logits = some_logits(len(ALL_KINDS))
    before = logits.clone()
    row = logits[0].numpy()
    assert state_of(top_p=0.9).adjust(row) is row
    Sampler().sample(logits, [state_of(**kind) for kind in ALL_KINDS])
    assert torch.equal(logits, before)


@given(st.lists(st.integers(0, 500)), st.lists(st.integers(0, 500), max_size=200))
@settings(deadline=None)
def test_token_counts_are_those_of_a_counter(prompt: list[int], answer: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in answer:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {**dict.fromkeys(prompt, 0), **Counter(answer)}
    assert len(counts.ids) == len(found)


# Log-probabilities.


def test_logprobs_are_of_the_raw_logits_whatever_the_sampling() -> None:
    logits = some_logits(3)
    states = [
        state_of(3, temperature=0.5, top_k=5, logprobs=4, logit_bias=((7, 100.0),)),
        state_of(3, temperature=0.0),
        state_of(3, temperature=0.0, repetition_penalty=50.0, prompt=(1,), logprobs=0),
    ]
    tokens, logprobs = Sampler().sample(logits, states)
    exact = torch.log_softmax(logits.double(), -1)
    assert tokens[0] == 7
    assert set(logprobs) == {0, 2}
    assert logprobs[0].sampled == pytest.approx(float(exact[0, 7]), abs=1e-5)
    values, ids = exact[0].topk(4)
    assert [token for token, _ in logprobs[0].top] == ids.tolist()
    assert [p for _, p in logprobs[0].top] == pytest.approx(values.tolist(), abs=1e-5)
    assert logprobs[2].top == ()
    assert logprobs[2].sampled == pytest.approx(float(exact[2, tokens[2]]), abs=1e-5)


def test_logprobs_are_finite_whatever_the_logits() -> None:
    logits = torch.full((2, 10), -math.inf)
    logits[0, 3] = 1.0
    logits[1] = math.nan
    _, logprobs = Sampler().sample(logits, [state_of(logprobs=20, temperature=0.0)] * 2)
    assert len(logprobs[0].top) == 10
    assert logprobs[0].top[0] == (3, 0.0)
    assert logprobs[0].top[1][1] == logprobs[1].sampled == LEAST_LOGPROB


# Rows that go wrong, and columns that are none.


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nan_and_infinities_give_valid_tokens_and_stay_in_their_row(kind: dict[str, Any]) -> None:
    logits = some_logits(5)
    states = [state_of(seed, **kind) for seed in range(5)]
    good = Sampler().sample(logits, states)[0]
    logits[0] = math.nan
    logits[1, 5] = math.nan
    logits[2, 6] = math.inf
    logits[3] = -math.inf
    tokens = Sampler().sample(logits, states)[0]
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[4] == good[4]
    assert tokens == Sampler().sample(logits, states)[0]
    assert tokens[1] != 5


def test_columns_beyond_the_vocabulary_are_never_drawn() -> None:
    padded = torch.cat([some_logits(12), torch.full((12, 20), 99.0)], dim=1)
    kinds = [*ALL_KINDS, {"top_k": 3}]
    states = [state_of(seed, **kind) for seed, kind in enumerate(kinds)]
    plain, logprobs = Sampler().sample(padded[:, :VOCAB].contiguous(), states)
    assert Sampler(VOCAB).sample(padded, states) == (plain, logprobs)
    assert max(plain) < VOCAB


def test_other_dtypes_are_taken_as_fp32() -> None:
    logits = some_logits(4).bfloat16()
    states = [state_of(seed, top_p=0.9) for seed in range(4)]
    assert Sampler().sample(logits, states) == Sampler().sample(logits.float(), states)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == ([], {})


def test_nothing_grows_with_the_number_of_distinct_parameters() -> None:
    sampler, logits = Sampler(), some_logits(1)

    def serve(count: int, begin: int) -> None:
        for i in range(begin, begin + count):
            state = state_of(
                i, temperature=0.5 + i / 1e4, top_p=1 - i / 1e4, logit_bias=((i % VOCAB, i / 100),)
            )
            sampler.sample(logits, [state])

    serve(300, 0)
    gc.collect()
    tracemalloc.start()
    serve(1000, 300)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 50_000
