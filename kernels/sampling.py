"""Drawing the next token: penalties, filters, and noise that depends on nothing but its place.

This file is the reference in numpy, which is also the CPU's path. One row of logits is handled at a
time, so that what a request gets cannot depend on what runs beside it.

A token is drawn by the Gumbel-max rule (Gumbel 1954; Maddison et al., A* Sampling, 2014): of the
tokens that the filters keep, the one with the greatest logit / temperature + noise, where the noise
of each token is standard Gumbel. That draws from the softmax exactly, and, unlike a search in
cumulated probabilities, it hardly ever changes its answer when the logits change by a rounding.

The noise of a token is a function of (seed, choice, position, token id) alone:

1. 32 bits x by Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011):
   key = (low half of the seed, high half), counter = (id // 4, position, choice, 0), and of its
   four words the one with number id % 4.
2. The exponential variate E = -log(1 - v) of v = (x + 0.5) / 2**32. Small v, to which fp32 gives
   its full precision, are the great noises that decide.
3. The noise, -log(E), from -2.9 to 22.9.

Steps 2 and 3 are made of single IEEE fp32 operations (`_log`), each rounded to nearest and none
fused, so that every device gives the same 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]  # 32-bit words in 64 bits: room for their products

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

_SQRT_HALF_BITS = np.int32(0x3F3504F3)  # of 0.70710678 in fp32
_LN2 = np.float32(0.6931471805599453)
_ATANH_SERIES = tuple(np.float32(1 / n) for n in (9, 7, 5, 3))


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is to be drawn. Filters apply in this order, as in transformers."""

    temperature: float  # above 0
    top_k: int  # 0: off
    top_p: float  # from 0 to 1; 1: off
    min_p: float  # from 0 to 1; 0: off
    seed: int  # 64 bits
    choice: int  # which of a prompt's answers
    position: int  # tokens of the answer before this one


def philox4x32(
    counter: Sequence[Words | np.uint64], key: Sequence[Words | np.uint64]
) -> list[Words]:
    """Philox4x32-10.

    Args:
        counter: four 32-bit words in uint64, each an array of one shape or a scalar.
        key: two, the same.

    Returns:
        The four output words, arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return [np.asarray(word) for word in (c0, c1, c2, c3)]


def noise_bits(
    ids: Ids,
    seed: int | Words,
    choice: int | Words,
    position: int | Words,
) -> NDArray[np.uint32]:
    """Return the 32 random bits of each token.

    Args:
        ids: token ids [N].
        seed, choice, position: one for all, or uint64 arrays [N].
    """
    blocks = ids.astype(np.uint64) >> np.uint64(2)
    words = _philox_blocks(blocks, seed, choice, position)
    bits: NDArray[np.uint32] = np.choose(ids & 3, words).astype(np.uint32)
    return bits


def all_noise_bits(vocab_size: int, seed: int, choice: int, position: int) -> NDArray[np.uint32]:
    """Return the 32 random bits of tokens 0 to vocab_size - 1."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    bits = np.empty((len(blocks), 4), dtype=np.uint32)
    for number, word in enumerate(_philox_blocks(blocks, seed, choice, position)):
        bits[:, number] = word
    return bits.reshape(-1)[:vocab_size]


def _philox_blocks(
    blocks: Words, seed: int | Words, choice: int | Words, position: int | Words
) -> list[Words]:
    seeds, choices, positions = np.uint64(seed), np.uint64(choice), np.uint64(position)
    # What is one for all stays a scalar: it is an array only from the third round on.
    counter = (blocks, positions, choices, np.uint64(0))
    return philox4x32(counter, (seeds & _LOW, seeds >> _HALF))


def gumbel_noise(bits: NDArray[np.uint32]) -> Floats:
    """Turn 32 random bits into standard Gumbel noise; falls as `bits` rises."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.maximum(np.float32(1) - v, np.float32(2.0**-25))
    exponential = -_log(u, less_one=np.where(v < np.float32(0.25), -v, u - np.float32(1)))
    return -_log(exponential)


def _log(x: Floats, less_one: Floats | None = None) -> Floats:
    """Natural logarithm of normal numbers, by fp32 operations that round alike everywhere.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) with s = (m - 1) / (m + 1), and
    |s| < 0.172, so that five terms of the series are enough.

    Args:
        x: positive numbers.
        less_one: x - 1 where that is known better than x itself; it counts where e = 0.
    """
    bits = x.view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    m = (bits - (exponent << np.int32(23))).view(np.float32)
    numerator = m - np.float32(1)
    if less_one is not None:
        numerator = np.where(exponent == 0, less_one, numerator)
    s = numerator / (m + np.float32(1))
    square = s * s
    series: Floats = np.full_like(s, _ATANH_SERIES[0])
    for term in (*_ATANH_SERIES[1:], np.float32(1)):
        series = series * square + term
    log_m = series * s * np.float32(2)
    return exponent.astype(np.float32) * _LN2 + log_m


def apply_penalties(
    row: Floats,
    ids: Ids,
    counts: NDArray[np.int32],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> None:
    """Make tokens that were seen less probable, in place.

    Args:
        row: logits [V].
        ids: tokens seen in the prompt or the answer [M], each once.
        counts: how often each was generated [M]; 0 for those of the prompt alone.
        repetition: divides positive logits and multiplies negative ones (CTRL, Keskar et al. 2019).
        presence: taken off once if the token was generated (OpenAI's definition, as `frequency`).
        frequency: taken off for each time that the token was generated.
    """
    values = row[ids]
    if repetition != 1.0:
        factor = np.float32(repetition)
        values = np.where(values < 0, values * factor, values / factor)
    if presence != 0.0 or frequency != 0.0:
        values -= np.float32(presence) * (counts > 0) + np.float32(frequency) * counts
    row[ids] = values


def most_probable(row: Floats) -> int:
    """Return the id of the greatest logit, the lowest id of several; NaN counts as the least.

    A row that is nothing but NaN gives 0.
    """
    token = int(row.argmax())  # of a row with NaN, the first NaN
    return int(np.nan_to_num(row, nan=-np.inf).argmax()) if np.isnan(row[token]) else token


def keep_tokens(row: Floats, draw: Draw) -> tuple[Ids | None, Floats]:
    """Apply temperature, top_k, top_p and min_p.

    Args:
        row: logits [V]; the greatest is finite.
        draw: the settings.

    Returns:
        The ids that are kept, ascending (None: all of them), and their (logit - greatest logit) /
        temperature.
    """
    best = row.max()
    ids = None
    if 0 < draw.top_k < len(row):
        least = np.partition(row, -draw.top_k)[-draw.top_k]
        ids = np.flatnonzero(row >= least)  # ties with the last are kept
        row = row[ids]
    scaled = row - best
    if draw.temperature != 1.0:
        scaled /= np.float32(draw.temperature)
    if draw.top_p < 1.0 or draw.min_p > 0.0:
        kept = _nucleus(np.exp(scaled), draw.top_p, draw.min_p)
        ids = kept if ids is None else ids[kept]
        scaled = scaled[kept]
    return ids, scaled


def _nucleus(weights: Floats, top_p: float, min_p: float) -> Ids:
    """Return the places that top_p (Holtzman et al. 2019) and then min_p keep, ascending.

    top_p keeps the fewest, in order of falling weight and rising place, whose sum is at least
    top_p of the whole; and at least one. min_p keeps weights of at least min_p of the greatest.

    Args:
        weights: probabilities up to a factor [N]; the greatest is 1.
        top_p, min_p: the filters.
    """
    if top_p >= 1.0:
        return np.flatnonzero(weights >= np.float32(min_p))
    total = float(weights.sum(dtype=np.float64))
    # Weights below this are less than 1 - top_p all together, so none of them is kept.
    least = 0.999 * (1.0 - top_p) * total / len(weights)
    places = np.flatnonzero(weights >= np.float32(least))
    weights = weights[places]
    kept = _fewest(weights, top_p * total)
    if min_p > 0.0:
        kept &= weights >= np.float32(min_p)
    return places[kept]


def _fewest(weights: Floats, wanted: float) -> NDArray[np.bool_]:
    """Mark the fewest weights whose sum is at least `wanted`; of equal ones, the first.

    Sorting all of them would take ten times as long: so they are summed in buckets of nearly equal
    ones (by sign, exponent and seven bits), and only the bucket where the sum is reached is sorted.
    """
    keys = weights.view(np.int32) >> 16
    keys -= keys.min()
    sums = np.cumsum(np.bincount(keys, weights)[::-1])
    rank = min(int(np.searchsorted(sums, wanted)), len(sums) - 1)
    bucket = len(sums) - 1 - rank
    missing = wanted - (float(sums[rank - 1]) if rank else 0.0)
    members = np.flatnonzero(keys == bucket)
    members = members[np.argsort(-weights[members], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[members], dtype=np.float64), missing)) + 1
    kept = keys > bucket
    kept[members[:count]] = True
    return kept


# Up to one token in so many of the vocabulary, computing the noise of the kept tokens one by one is
# faster than that of the whole vocabulary: four neighbours share a computation.
_FEW = 8


def draw_tokens(rows: Sequence[Floats], draws: Sequence[Draw]) -> list[int]:
    """Draw one token from each row.

    Args:
        rows: logits, each [V] in fp32; not changed.
        draws: one for each row.

    Returns:
        Token ids. A row whose greatest logit is not finite gives its most probable token.
    """
    tokens = [0] * len(rows)
    few: list[tuple[int, Ids, Floats]] = []
    with np.errstate(all="ignore"):  # infinities and NaN in the logits are provided for
        for index, (row, draw) in enumerate(zip(rows, draws, strict=True)):
            if not math.isfinite(row.max()):
                tokens[index] = most_probable(row)
                continue
            ids, scaled = keep_tokens(row, draw)
            if ids is None or len(ids) > len(row) // _FEW:
                tokens[index] = _draw_among_many(ids, scaled, draw, len(row))
            else:
                few.append((index, ids, scaled))
        if few:
            drawn = _draw_among_few([(draws[i], ids, scaled) for i, ids, scaled in few])
            for (index, _, _), token in zip(few, drawn, strict=True):
                tokens[index] = token
    return tokens


def _draw_among_few(rows: Sequence[tuple[Draw, Ids, Floats]]) -> list[int]:
    """Draw from rows of few kept tokens, the noise of all of them computed together."""
    lengths = [len(ids) for _, ids, _ in rows]
    keys = np.array([(d.seed, d.choice, d.position) for d, _, _ in rows], dtype=np.uint64)
    seeds, choices, positions = np.repeat(keys, lengths, axis=0).T
    bits = noise_bits(np.concatenate([ids for _, ids, _ in rows]), seeds, choices, positions)
    noise = np.split(gumbel_noise(bits), np.cumsum(lengths)[:-1])
    return [
        int(ids[(scaled + part).argmax()])
        for (_, ids, scaled), part in zip(rows, noise, strict=True)
    ]


def _draw_among_many(ids: Ids | None, scaled: Floats, draw: Draw, vocab_size: int) -> int:
    """Draw from a row of many kept tokens, turning bits into noise only where it could win.

    With the score of any token as a lower bound, a token of scaled logit z needs more noise than
    the bound less z, which is fewer bits than a limit.
    """
    bits = all_noise_bits(vocab_size, draw.seed, draw.choice, draw.position)
    if ids is not None:
        bits = bits[ids]
    probable = scaled >= np.float32(-3)
    lucky = bits < np.uint32((2**32 - 1) // (len(bits) // 64 + 1))
    lucky[scaled.argmax()] = True
    bound = float((scaled[lucky] + gumbel_noise(bits[lucky])).max())
    could_win = (bits <= _most_bits(bound + 3.0)) | (probable & (bits <= _most_bits(bound)))
    places = np.flatnonzero(could_win)
    place = places[(scaled[places] + gumbel_noise(bits[places])).argmax()]
    return int(place if ids is None else ids[place])


def _most_bits(noise: float) -> np.uint32:
    """Return bits above which the noise is certainly less than `noise`."""
    slack = 1e-3  # far above the roundings of fp32, of scores as well
    v = -math.expm1(-math.exp(min(slack - noise, 50.0)))
    return np.uint32(min(v * 2.0**32, 2.0**32 - 1))
