"""Bounds of the least logit that top_k and top_p keep, on a GPU, without a sort.

Hardly any token of a vocabulary can be the last one that is kept. top_k keeps nothing below the
k-th greatest of the peaks of runs of tokens; top_p nothing so improbable that all such tokens
together have less than 1 - top_p. For top_p two passes then weigh what is at or above each of
eight logits, and so leave a sixty-fourth of the range. What is within the bounds is gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl

EDGES = tl.constexpr(8)  # logits of one pass that cut the range of top_p's threshold


@triton.jit
def scaled_logits(row, columns, vocab, best, temperature):
    """Load logits as (logit - best) / temperature, or as they are at temperature 0; NaN: -inf."""
    x = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(temperature > 0.0, (x - best) / tl.maximum(temperature, 1e-30), x)


@triton.jit
def ordered(x):
    """Map fp32 to uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def from_ordered(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, ~key)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def peaks_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    peak_ptr,
    block_peak_ptr,
    mass_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """The greatest logit of each run, and the sum of a block's weights, its peak's being 1."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + tl.load(slot_ptr + index))
    if temperature > 0.0:
        row = logits_ptr + index.to(tl.int64) * stride
        x = scaled_logits(row, part * BLOCK + tl.arange(0, BLOCK), VOCAB, 0.0, 1.0)
        runs: tl.constexpr = BLOCK // RUN
        peaks = tl.max(tl.reshape(x, (runs, RUN)), 1)
        block = index * tl.num_programs(1) + part
        tl.store(peak_ptr + block * runs + tl.arange(0, runs), peaks)
        greatest = tl.max(peaks, 0)
        safe = tl.where(greatest == float("-inf"), 0.0, greatest)
        tl.store(block_peak_ptr + block, greatest)
        tl.store(mass_ptr + block, tl.sum(tl.exp((x - safe) / temperature), 0))


@triton.jit
def _bound_of_top_k(peaks, top_k):
    """Return a logit that top_k others or more are equal to or above: 16 bits of a peak."""
    keys = ordered(peaks)
    low = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(16):
        enough = tl.sum((keys >= (low | bit)).to(tl.int32), 0) >= top_k
        low = tl.where(enough, low | bit, low)
        bit = bit >> 1
    return tl.where(low < 0x00800000, float("-inf"), from_ordered(low))  # fewer runs than top_k


@triton.jit
def _edge(low, high, number):
    """Return one of `EDGES` logits from above `low` to `high`; the same bits in every kernel."""
    return low + (high - low) * ((1.0 + number) * (1.0 / EDGES))


@triton.jit
def _narrowed(low, high, above, wanted, sum_ptr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    """Narrow the range that has top_p's threshold by the sums over the edges of one pass.

    Args:
        low, high: at or above `low` are weights of at least `wanted`, at or above `high` of less.
        above: the weight at or above `high`.
        sum_ptr: [PARTS, EDGES]
    """
    parts, numbers = tl.arange(0, PARTS_PADDED), tl.arange(0, EDGES)
    offsets = parts[:, None] * EDGES + numbers[None, :]
    sums = tl.sum(tl.load(sum_ptr + offsets, (parts < PARTS)[:, None], other=0.0), 0)
    edges = _edge(low, high, numbers)
    # The best is kept whatever is wanted. What was too little in one pass is so in the next.
    enough = (sums >= wanted) & (edges <= 0.0) & ((edges < high) | (edges == 0.0))
    new_low = tl.maximum(low, tl.max(tl.where(enough, edges, low), 0))
    new_high = tl.minimum(high, tl.min(tl.where(enough, high, edges), 0))
    new_above = tl.maximum(above, tl.max(tl.where(enough, 0.0, sums), 0))
    is_best = new_low >= 0.0
    return new_low, tl.where(is_best, 1.0, new_high), tl.where(is_best, 0.0, new_above)


@triton.jit
def sums_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peak_ptr,
    block_peak_ptr,
    mass_ptr,
    best_ptr,
    total_ptr,
    bound_ptr,
    sum_ptr,
    stride,
    LEVEL: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Bound what is kept (pass 0), and weigh a block's tokens at or above each edge.

    sum [2, row, PARTS, EDGES] are these weights in passes 0 and 1.
    """
    index = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    if temperature <= 0.0:
        return
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    is_weighed = (top_p < 1.0) & (not has_top_k)
    if is_weighed | ((part == 0) & (LEVEL == 0)):
        if LEVEL == 0:
            parts = tl.arange(0, PARTS_PADDED)
            blocks = index * PARTS + parts
            peaks = tl.load(block_peak_ptr + blocks, parts < PARTS, other=float("-inf"))
            masses = tl.load(mass_ptr + blocks, parts < PARTS, other=0.0)
            best = tl.max(peaks, 0)
            total = tl.sum(masses * tl.exp((peaks - best) / temperature), 0)
            bound = tl.log(0.999 * (1.0 - top_p) * total / VOCAB)
            if part == 0:
                if has_top_k:
                    runs: tl.constexpr = BLOCK // RUN
                    number = tl.arange(0, PARTS_PADDED * runs)
                    run_peaks = peak_ptr + index * PARTS * runs + number
                    all_peaks = tl.load(run_peaks, number < PARTS * runs, other=float("-inf"))
                    bound = (_bound_of_top_k(all_peaks, top_k) - best) / temperature
                tl.store(best_ptr + index, best)
                tl.store(total_ptr + index, total)
                tl.store(bound_ptr + index, bound)
        else:
            best = tl.load(best_ptr + index)
            total = tl.load(total_ptr + index)
            bound = tl.load(bound_ptr + index)
        if is_weighed:
            rows = tl.num_programs(0)
            low = bound
            high = 0.0
            if LEVEL == 1:
                first = sum_ptr + index * PARTS * EDGES
                low, high, _ = _narrowed(low, high, 0.0, top_p * total, first, PARTS, PARTS_PADDED)
            row = logits_ptr + index.to(tl.int64) * stride
            z = scaled_logits(row, part * BLOCK + tl.arange(0, BLOCK), VOCAB, best, temperature)
            weights = tl.exp(z)
            place = (LEVEL * rows + index) * PARTS + part
            # One edge after the other: all at once would take every register there is.
            for number in tl.static_range(EDGES):
                above = tl.sum(tl.where(z >= _edge(low, high, number), weights, 0.0), 0)
                tl.store(sum_ptr + place * EDGES + number, above)


@triton.jit
def gather_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    total_ptr,
    bound_ptr,
    sum_ptr,
    least_ptr,
    above_ptr,
    candidate_ptr,
    count_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Gather a block's scaled logits that could be the least kept: candidate [row, ROOM, part].

    Of the row, it leaves in `least` a logit below all of these, and in `above` the weight of all
    that are greater.
    """
    index = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    if temperature <= 0.0:
        return
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    if has_top_k | (top_p < 1.0):
        rows = tl.num_programs(0)
        best = tl.load(best_ptr + index)
        low = tl.load(bound_ptr + index)
        high = 1.0  # above the best, which is 0
        above = 0.0
        if not has_top_k:
            wanted = top_p * tl.load(total_ptr + index)
            high = 0.0
            for level in tl.static_range(2):
                low, high, above = _narrowed(
                    low, high, above, wanted,
                    sum_ptr + (level * rows + index) * PARTS * EDGES, PARTS, PARTS_PADDED,
                )  # fmt: skip
        if part == 0:
            tl.store(least_ptr + index, low)
            tl.store(above_ptr + index, above)
        columns = part * BLOCK + tl.arange(0, BLOCK)
        row = logits_ptr + index.to(tl.int64) * stride
        z = scaled_logits(row, columns, VOCAB, best, temperature)
        is_candidate = ((z >= low) & (z < high) & (columns < VOCAB)).to(tl.int32)
        count = tl.sum(is_candidate, 0)
        tl.store(count_ptr + index * PARTS_PADDED + part, count)
        if (count > 0) & (count <= ROOM):
            place = index.to(tl.int64) * ROOM + tl.cumsum(is_candidate, 0) - 1
            tl.store(candidate_ptr + place * PARTS_PADDED + part, z, is_candidate != 0)
