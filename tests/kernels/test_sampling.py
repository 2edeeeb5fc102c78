"""The reference of drawing tokens, against Random123, transformers and closed formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mii.kernels.sampling import (
    Draw,
    Floats,
    all_noise_bits,
    apply_penalties,
    draw_tokens,
    gumbel_noise,
    keep_tokens,
    most_probable,
    noise_bits,
    philox4x32,
)

GOLDEN = np.array([3, 2, 2, 1, 0], dtype=np.float32)


def a_draw(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    seed: int = 7,
    choice: int = 0,
    position: int = 0,
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, choice, position)


def some_logits(vocab: int, seed: int, spread: float = 3.0) -> Floats:
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal(vocab)).astype(np.float32)


# Noise.


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper has it, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def bits_of(token: int, draw: Draw) -> int:
    counter = [token // 4, draw.position, draw.choice, 0]
    return philox_in_integers(counter, [draw.seed % 2**32, draw.seed >> 32])[token % 4]


def noise_of(token: int, draw: Draw) -> float:
    """The token's Gumbel noise in fp64."""
    return -math.log(-math.log1p(-(bits_of(token, draw) + 0.5) / 2**32))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    arrays = [np.array([word], dtype=np.uint64) for word in counter]
    given_key = [np.array([word], dtype=np.uint64) for word in key]
    assert [int(word[0]) for word in philox4x32(arrays, given_key)] == words
    assert philox_in_integers(counter, key) == words


def test_each_token_has_its_own_word_of_its_own_counter() -> None:
    draw = a_draw(seed=0x0123456789ABCDEF, choice=3, position=41)
    ids = np.array([0, 1, 2, 3, 4, 4099, 262143])
    expected = [bits_of(int(token), draw) for token in ids]
    assert noise_bits(ids, draw.seed, draw.choice, draw.position).tolist() == expected
    whole = all_noise_bits(262144, draw.seed, draw.choice, draw.position)
    assert whole[ids].tolist() == expected


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 4096])
def test_noise_of_the_whole_vocabulary_is_that_of_each_token(vocab: int) -> None:
    one_by_one = noise_bits(np.arange(vocab), 2**63 - 1, 1, 9)
    assert np.array_equal(all_noise_bits(vocab, 2**63 - 1, 1, 9), one_by_one)


def test_gumbel_noise_is_that_of_the_formula_and_falls_as_bits_rise() -> None:
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [
            np.arange(3000),
            2**32 - 1 - np.arange(3000),
            2**30 + np.arange(-1000, 1000),  # where the numerator changes
            rng.integers(0, 2**32, 100_000),
        ]
    ).astype(np.uint32)
    bits.sort()
    noise = gumbel_noise(bits)
    assert noise.dtype == np.float32
    assert (np.diff(noise) <= 0).all()
    exact = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))
    decisive = bits < 2**31  # the greater half; the least noises have fewer bits to be told apart
    assert np.abs(noise - exact)[decisive].max() < 3e-6
    assert np.abs(noise - exact).max() < 0.3
    assert noise.min() > -2.9
    assert 22.8 < noise.max() < 22.9


def test_noise_is_frozen() -> None:
    """A seed gives the same answers in every version and on every device: these bits may never
    change."""
    bits = np.array([0, 1, 12345, 2**28, 2**30 - 1, 2**30, 2**31, 3 * 2**30, 2**32 - 1])
    noise = gumbel_noise(bits.astype(np.uint32)).view(np.uint32).tolist()
    assert " ".join(f"{word:08x}" for word in noise) == (
        "41b6fda9 41ae33b3 414c2793 402f643d 3f9f79a2 3f9f79a2 3ebba795 bea73c9b c0368d1d"
    )


# Penalties.


def test_repetition_penalty_of_the_golden_table() -> None:
    row = np.array([2, -1, 0], dtype=np.float32)
    apply_penalties(row, np.arange(3), np.zeros(3, dtype=np.int32), repetition=2.0)
    assert row.tolist() == [1, -2, 0]


@given(st.floats(0.01, 100), st.lists(st.integers(0, 49), min_size=1, max_size=60))
def test_repetition_penalty_equals_transformers(factor: float, seen: list[int]) -> None:
    row = some_logits(50, 1)
    processor = RepetitionPenaltyLogitsProcessor(factor)
    expected = processor(torch.tensor([seen]), torch.from_numpy(row.copy())[None])[0]
    ids = np.array(sorted(set(seen)))
    apply_penalties(row, ids, np.zeros(len(ids), dtype=np.int32), repetition=factor)
    assert row.tolist() == expected.tolist()


def test_presence_and_frequency_count_generated_tokens() -> None:
    row = np.zeros(5, dtype=np.float32)
    counts = np.array([0, 1, 3], dtype=np.int32)
    apply_penalties(row, np.array([4, 0, 2]), counts, presence=0.5, frequency=0.25)
    assert row.tolist() == [-0.75, 0, -1.25, 0, 0]


def test_repetition_comes_before_presence() -> None:
    row = np.array([4, -4], dtype=np.float32)
    ones = np.ones(2, dtype=np.int32)
    apply_penalties(row, np.arange(2), ones, repetition=2.0, presence=1.0)
    assert row.tolist() == [1, -9]


# Filters.


@pytest.mark.parametrize(
    ("draw", "kept"),
    [
        (a_draw(top_k=2), [0, 1, 2]),
        (a_draw(top_k=1), [0]),
        (a_draw(top_k=5), [0, 1, 2, 3, 4]),
        (a_draw(top_k=99), [0, 1, 2, 3, 4]),
        (a_draw(top_p=0.0), [0]),
        (a_draw(top_p=1e-9), [0]),
        (a_draw(top_p=0.5), [0]),
        (a_draw(top_p=0.75), [0, 1, 2]),
        (a_draw(top_p=0.95), [0, 1, 2, 3]),
        (a_draw(top_p=1.0), [0, 1, 2, 3, 4]),
        (a_draw(min_p=0.3), [0, 1, 2]),
        (a_draw(min_p=0.37), [0]),
        (a_draw(min_p=1.0), [0]),
        (a_draw(temperature=0.5, top_p=0.75), [0]),
        (a_draw(top_k=3, top_p=0.6), [0, 1]),  # 0.576 of what top_k left is not enough
    ],
)
def test_filters_of_the_golden_table(draw: Draw, kept: list[int]) -> None:
    ids, scaled = keep_tokens(GOLDEN, draw)
    assert (list(range(5)) if ids is None else ids.tolist()) == kept
    assert scaled.tolist() == [(GOLDEN[i] - 3) / draw.temperature for i in kept]


def kept_by_transformers(logits: Floats, draw: Draw) -> list[int]:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(draw.temperature)])
    if draw.top_k:
        warpers.append(TopKLogitsWarper(draw.top_k))
    if draw.top_p < 1:
        warpers.append(TopPLogitsWarper(draw.top_p))
    if draw.min_p > 0:
        warpers.append(MinPLogitsWarper(draw.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None].double())
    return torch.isfinite(scores[0]).nonzero().flatten().tolist()


def is_on_an_edge(logits: Floats, draw: Draw) -> bool:
    """Whether fp32 and fp64 may differ in what a filter keeps."""
    scaled = torch.tensor(logits).double() / draw.temperature
    if draw.top_k:
        least = scaled.sort(descending=True).values[min(draw.top_k, len(scaled)) - 1]
        scaled = scaled[scaled >= least]
    p = torch.softmax(scaled, -1).sort(descending=True).values
    kept = int((p.cumsum(-1) - p < draw.top_p).sum())  # of two that tie, fp32 may keep either
    ties = p[kept - 1 : kept] / p[kept : kept + 1] - 1
    edges = torch.cat([p.cumsum(-1) - draw.top_p, p / p[0] - draw.min_p, ties])
    return bool((edges.abs() < 1e-5 * max(1.0, 1 / draw.temperature)).any())


DRAWS = st.builds(
    Draw,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.5, 10.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 300]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 127),
    position=st.integers(0, 10_000),
)


@given(DRAWS, st.integers(0, 2**32), st.sampled_from([1, 2, 30, 300]), st.floats(0.1, 8))
@settings(max_examples=300, deadline=None)
def test_filters_keep_what_transformers_keeps(
    draw: Draw, seed: int, vocab: int, spread: float
) -> None:
    logits = some_logits(vocab, seed, spread)
    assume(not is_on_an_edge(logits, draw))
    ids, _ = keep_tokens(logits, draw)
    kept = list(range(vocab)) if ids is None else ids.tolist()
    assert kept == kept_by_transformers(logits, draw)


@pytest.mark.parametrize("vocab", [10, 50_000])
def test_of_equal_probabilities_top_p_keeps_the_lowest_ids(vocab: int) -> None:
    ids, _ = keep_tokens(np.zeros(vocab, dtype=np.float32), a_draw(top_p=0.35))
    assert ids is not None
    assert ids.tolist() == list(range(math.ceil(0.35 * vocab)))


@given(st.floats(0, 0.9999), st.integers(0, 100), st.sampled_from([0.5, 1.0, 100.0]))
@settings(max_examples=50, deadline=None)
def test_top_p_of_a_large_vocabulary_is_the_smallest_set(
    top_p: float, seed: int, temperature: float
) -> None:
    logits = some_logits(5000, seed)
    ids, scaled = keep_tokens(logits, a_draw(temperature, top_p=top_p))
    assert ids is not None
    p = torch.softmax(torch.tensor(logits).double() / temperature, -1)
    mass = float(p[ids].sum())
    assert mass >= top_p - 1e-6
    assert len(ids) == 1 or mass - float(p[ids].min()) < top_p + 1e-6
    others = np.delete(p.numpy(), ids)
    rounding = 1 - 1e-5  # of fp32: two tokens may be as near to each other
    assert len(others) == 0 or float(p[ids].min()) >= rounding * float(others.max())


# Draws.


@given(DRAWS, st.integers(0, 2**32), st.sampled_from([1, 2, 7, 63, 64, 500]), st.floats(0.1, 8))
@settings(max_examples=200, deadline=None)
def test_draws_take_the_greatest_of_kept_logits_plus_noise(
    draw: Draw, seed: int, vocab: int, spread: float
) -> None:
    logits = some_logits(vocab, seed, spread)
    assume(not is_on_an_edge(logits, draw))
    scores = {
        token: float(logits[token]) / draw.temperature + noise_of(token, draw)
        for token in kept_by_transformers(logits, draw)
    }
    best = max(scores, key=lambda token: scores[token])
    rounding = 1e-4 / draw.temperature
    assume(all(scores[best] - score > rounding for t, score in scores.items() if t != best))
    assert draw_tokens([logits], [draw]) == [best]


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.99, 1.0])
def test_a_large_vocabulary_is_drawn_from_without_computing_all_noise(
    spread: float, top_p: float
) -> None:
    """The whole noise gives the same token as the part of it that could win."""
    vocab = 20_000
    for seed in range(20):
        logits = some_logits(vocab, seed, spread)
        draw = a_draw(top_p=top_p, seed=seed)
        ids, scaled = keep_tokens(logits, draw)
        noise = gumbel_noise(noise_bits(np.arange(vocab), seed, 0, 0))
        ids = np.arange(vocab) if ids is None else ids
        assert draw_tokens([logits], [draw]) == [int(ids[(scaled + noise[ids]).argmax()])]


@pytest.mark.parametrize(
    "filters",
    [a_draw(), a_draw(0.7), a_draw(1.4, top_p=0.8), a_draw(top_k=4), a_draw(min_p=0.1)],
)
def test_draws_follow_the_distribution(filters: Draw) -> None:
    """Pearson's chi-squared test, at a significance of 0.001."""
    logits = some_logits(12, 5, 1.0)
    count = 3000
    draws = [
        a_draw(
            filters.temperature,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            seed=position % 5,
            position=position,
        )
        for position in range(count)
    ]
    tokens = draw_tokens([logits] * count, draws)
    kept = kept_by_transformers(logits, filters)
    scaled = torch.tensor(logits)[kept].double() / filters.temperature
    expected = count * torch.softmax(scaled, -1).numpy()
    observed = np.bincount(tokens, minlength=12)
    assert observed.sum() == observed[kept].sum()
    statistic = float(((observed[kept] - expected) ** 2 / expected).sum())
    critical = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 11: 31.3}
    assert statistic < critical[len(kept) - 1]


def test_choices_positions_and_seeds_draw_independently() -> None:
    """Pairs of draws that differ in one thing agree as often as chance has it, one in eight."""
    logits = np.zeros(8, dtype=np.float32)
    base = [a_draw(seed=5, position=i) for i in range(1000)]
    others = [
        [a_draw(seed=6, position=i) for i in range(1000)],
        [a_draw(seed=5, choice=1, position=i) for i in range(1000)],
        [a_draw(seed=5, position=i + 1) for i in range(1000)],
        [a_draw(seed=5 + 2**32, position=i) for i in range(1000)],
    ]
    tokens = draw_tokens([logits] * 1000, base)
    for draws in others:
        drawn = draw_tokens([logits] * 1000, draws)
        agree = sum(a == b for a, b in zip(tokens, drawn, strict=True))
        assert 83 < agree < 167  # 125, more or less four standard deviations


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    rng = np.random.default_rng(3)
    rows = [some_logits(3000, seed, 2.0) for seed in range(24)]
    draws = [
        a_draw(
            float(rng.choice([0.5, 1.0, 5.0])),
            int(rng.choice([0, 50])),
            float(rng.choice([0.9, 1.0])),
            float(rng.choice([0.0, 0.02])),
            seed=seed,
            position=int(rng.integers(100)),
        )
        for seed in range(24)
    ]
    together = draw_tokens(rows, draws)
    assert together == [draw_tokens([r], [d])[0] for r, d in zip(rows, draws, strict=True)]
    assert together == draw_tokens(rows[::-1], draws[::-1])[::-1]


# Rows that are not finite.


def test_rows_that_are_not_finite_give_a_valid_token_and_leave_others_alone() -> None:
    good = some_logits(100, 0)
    nan, some_nan, infinite, nothing = (good.copy() for _ in range(4))
    nan[:] = np.nan
    some_nan[:5] = np.nan
    infinite[17] = np.inf
    nothing[:] = -np.inf
    rows = [nan, good, some_nan, infinite, nothing, good]
    tokens = draw_tokens(rows, [a_draw(top_p=0.9)] * len(rows))
    assert tokens[1] == tokens[5] == draw_tokens([good], [a_draw(top_p=0.9)])[0]
    assert tokens[0] == tokens[4] == 0
    assert tokens[2] == 5 + int(good[5:].argmax())
    assert tokens[3] == 17
    assert [most_probable(row) for row in rows[::2]] == tokens[::2]


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[4321] = -1e30
    for draw in (a_draw(), a_draw(100.0), a_draw(top_p=0.5), a_draw(top_k=10), a_draw(min_p=0.5)):
        assert draw_tokens([logits], [draw]) == [4321]


def test_the_least_temperature_is_as_good_as_greedy() -> None:
    rows = [some_logits(5000, seed, 10.0) * 100 for seed in range(20)]
    tokens = draw_tokens(rows, [a_draw(1e-5, seed=seed) for seed in range(20)])
    assert tokens == [int(row.argmax()) for row in rows]
