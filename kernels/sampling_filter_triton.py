"""Finding the least logit that top_k, top_p and min_p keep, on a GPU, without a sort.

Hardly any token of a vocabulary can be the last one that is kept, and bounds tell which: top_k keeps
nothing below the k-th greatest of the peaks of runs of tokens; top_p nothing so improbable that all
such tokens together have less than 1 - top_p. For top_p two passes then weigh what is at or above
each of eight logits, and so leave a sixty-fourth of the range. What is within the bounds is
gathered, and the least kept logit found among it by bisection. Sums are taken in a fixed order for
each row, whatever runs beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits of one program
_RUN = 128  # logits that share a peak
_ROOM = 512  # logits that are gathered from one block; if there are more, none are gathered
_EDGES = tl.constexpr(8)  # logits of one pass that cut the range of top_p's threshold
_ABOVE_BEST = tl.constexpr(1.0)  # a scaled logit greater than any: the best is 0
_ABOVE_BEST_KEY = tl.constexpr(0x80000001)


@triton.jit
def scaled_logits(row, columns, vocab, best, temperature):
    """Load logits as (logit - best) / temperature, or as they are at temperature 0; NaN: -inf."""
    x = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(temperature > 0.0, (x - best) / tl.maximum(temperature, 1e-30), x)


@triton.jit
def _ordered(x):
    """Map fp32 to uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _from_ordered(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, ~key)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _peaks_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    peak_ptr,
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
        tl.store(mass_ptr + block, tl.sum(tl.exp((x - safe) / temperature), 0))


@triton.jit
def _bound_of_top_k(peaks, top_k):
    """Return a logit that top_k others or more are equal to or above: 16 bits of a peak."""
    keys = _ordered(peaks)
    low = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(16):
        enough = tl.sum((keys >= (low | bit)).to(tl.int32), 0) >= top_k
        low = tl.where(enough, low | bit, low)
        bit = bit >> 1
    return tl.where(low < 0x00800000, float("-inf"), _from_ordered(low))  # fewer runs than top_k


@triton.jit
def _edges(low, high):
    """Return `_EDGES` logits from above `low` to `high`."""
    return low + (high - low) * ((1.0 + tl.arange(0, _EDGES)) / _EDGES)


@triton.jit
def _narrowed(low, high, above, wanted, sum_ptr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    """Narrow the range that has top_p's threshold by the sums over the edges of one pass.

    Args:
        low, high: at or above `low` are weights of at least `wanted`, at or above `high` of less.
        above: the weight at or above `high`.
        sum_ptr: [PARTS, _EDGES]
    """
    parts, numbers = tl.arange(0, PARTS_PADDED), tl.arange(0, _EDGES)
    offsets = parts[:, None] * _EDGES + numbers[None, :]
    sums = tl.sum(tl.load(sum_ptr + offsets, (parts < PARTS)[:, None], other=0.0), 0)
    edges = _edges(low, high)
    # Nothing is above the best, so that it is kept whatever is wanted.
    enough = (sums >= wanted) & (edges <= 0.0)
    new_low = tl.maximum(low, tl.max(tl.where(enough, edges, low), 0))
    new_high = tl.minimum(high, tl.min(tl.where(enough, high, edges), 0))
    new_above = tl.maximum(above, tl.max(tl.where(enough, 0.0, sums), 0))
    return new_low, tl.where(new_low >= high, _ABOVE_BEST, new_high), new_above


@triton.jit
def _sums_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peak_ptr,
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

    sum [2, row, PARTS, _EDGES] are these weights in passes 0 and 1.
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
    if LEVEL == 0:
        runs: tl.constexpr = BLOCK // RUN
        number = tl.arange(0, PARTS_PADDED * runs)
        peak_row = peak_ptr + index * PARTS * runs
        peaks = tl.load(peak_row + number, number < PARTS * runs, other=float("-inf"))
        best = tl.max(peaks, 0)
        parts = tl.arange(0, PARTS_PADDED)
        masses = tl.load(mass_ptr + index * PARTS + parts, parts < PARTS, other=0.0)
        block_peaks = tl.max(tl.reshape(peaks, (PARTS_PADDED, runs)), 1)
        total = tl.sum(masses * tl.exp((block_peaks - best) / temperature), 0)
        bound = tl.log(0.999 * (1.0 - top_p) * total / VOCAB)
        if part == 0:
            if has_top_k:
                bound = (_bound_of_top_k(peaks, top_k) - best) / temperature
            tl.store(best_ptr + index, best)
            tl.store(total_ptr + index, total)
            tl.store(bound_ptr + index, bound)
    else:
        best = tl.load(best_ptr + index)
        total = tl.load(total_ptr + index)
        bound = tl.load(bound_ptr + index)
    if has_top_k | (top_p >= 1.0):
        return
    rows = tl.num_programs(0)
    low, high = bound, 0.0
    if LEVEL == 1:
        low, high, _ = _narrowed(
            low, high, 0.0, top_p * total, sum_ptr + index * PARTS * _EDGES, PARTS, PARTS_PADDED
        )
    row = logits_ptr + index.to(tl.int64) * stride
    z = scaled_logits(row, part * BLOCK + tl.arange(0, BLOCK), VOCAB, best, temperature)
    is_above = z[:, None] >= _edges(low, high)[None, :]
    sums = tl.sum(tl.where(is_above, tl.exp(z)[:, None], 0.0), 0)
    place = (LEVEL * rows + index) * PARTS + part
    tl.store(sum_ptr + place * _EDGES + tl.arange(0, _EDGES), sums)


@triton.jit
def _gather_kernel(
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
        high, above = _ABOVE_BEST + 0.0, 0.0
        if not has_top_k:
            wanted = top_p * tl.load(total_ptr + index)
            high = 0.0
            for level in tl.static_range(2):
                low, high, above = _narrowed(
                    low, high, above, wanted,
                    sum_ptr + (level * rows + index) * PARTS * _EDGES, PARTS, PARTS_PADDED,
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
        if count <= ROOM:
            place = index.to(tl.int64) * ROOM + tl.cumsum(is_candidate, 0) - 1
            tl.store(candidate_ptr + place * PARTS_PADDED + part, z, is_candidate != 0)


@triton.jit
def _candidates(
    places,
    whole,
    row,
    best,
    temperature,
    candidate_ptr,
    count_ptr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Return the scaled logits at these places, and which of them exist."""
    if whole:
        exists = places < VOCAB
        z = scaled_logits(row, places, VOCAB, best, temperature)
    else:
        part = places % PARTS_PADDED
        exists = places // PARTS_PADDED < tl.load(count_ptr + part, part < PARTS, other=0)
        z = tl.load(candidate_ptr + places, exists, other=0.0)
    return z, exists


@triton.jit
def _at_or_above(
    key,
    whole,
    limit,
    row,
    best,
    temperature,
    candidate_ptr,
    count_ptr,
    BY_NUMBER: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return how many candidates are at or above a key, or their weight."""
    sums = tl.zeros([TILE], tl.float32)
    for start in range(0, limit, TILE):
        z, exists = _candidates(
            start + tl.arange(0, TILE), whole, row, best, temperature, candidate_ptr, count_ptr,
            VOCAB, PARTS, PARTS_PADDED,
        )  # fmt: skip
        counts = exists & (_ordered(z) >= key)
        if BY_NUMBER:
            sums += counts.to(tl.float32)
        else:
            sums += tl.where(counts, tl.exp(z), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _least_kept(
    low,
    wanted,
    whole,
    limit,
    row,
    best,
    temperature,
    candidate_ptr,
    count_ptr,
    BY_NUMBER: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the greatest key from `low` on that has as much as `wanted` at or above it."""
    high = tl.full([], _ABOVE_BEST_KEY, tl.uint32)
    while high - low > 1:
        middle = low + (high - low) // 2
        found = _at_or_above(
            middle, whole, limit, row, best, temperature, candidate_ptr, count_ptr,
            BY_NUMBER, VOCAB, PARTS, PARTS_PADDED, TILE,
        )  # fmt: skip
        enough = found >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _threshold_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    total_ptr,
    least_ptr,
    above_ptr,
    candidate_ptr,
    count_ptr,
    threshold_ptr,
    stride,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    if temperature <= 0.0:
        return
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    low = tl.full([], 0, tl.uint32)
    if has_top_k | (top_p < 1.0):
        best = tl.load(best_ptr + index)
        total = tl.load(total_ptr + index)
        above = tl.load(above_ptr + index)
        low = _ordered(tl.load(least_ptr + index))
        row = logits_ptr + index.to(tl.int64) * stride
        candidates = candidate_ptr + index.to(tl.int64) * ROOM * PARTS_PADDED
        counts = count_ptr + index * PARTS_PADDED
        parts = tl.arange(0, PARTS_PADDED)
        most = tl.max(tl.load(counts + parts, parts < PARTS, other=0), 0)
        whole = most > ROOM
        limit = tl.where(whole, VOCAB, most * PARTS_PADDED)
        above = tl.where(whole, 0.0, above)  # then they are among those that are weighed
        if has_top_k:
            low = _least_kept(
                low, top_k, whole, limit, row, best, temperature, candidates, counts,
                True, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
            total = _at_or_above(
                low, whole, limit, row, best, temperature, candidates, counts,
                False, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
        if top_p < 1.0:
            low = _least_kept(
                low, top_p * total - above, whole, limit, row, best, temperature, candidates,
                counts, False, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
    threshold = _from_ordered(low)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, tl.log(min_p))
    tl.store(threshold_ptr + index, threshold)


def find_thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find what the filters keep of each row; nothing is read by the host.

    Args:
        logits: [rows, vocabulary], any float dtype, columns contiguous
        slots: int64 [rows], each row's place in the settings
        temperature, top_k, top_p, min_p: settings by slot, see `mii.kernels.sampling.Draw`

    Returns:
        best, thresholds: fp32 [rows], the greatest logit, and the least (logit - best) /
        temperature that is kept; undefined for rows whose temperature is 0
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    parts_padded = triton.next_power_of_2(parts)
    device = logits.device

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    best, total, bound, least, above, threshold = (floats(rows) for _ in range(6))
    peaks, masses = floats(rows, parts, _BLOCK // _RUN), floats(rows, parts)
    sums = floats(2, rows, parts, _EDGES.value)
    candidates = floats(rows, _ROOM, parts_padded)
    counts = torch.empty((rows, parts_padded), dtype=torch.int32, device=device)
    stride, settings = logits.stride(0), (temperature, top_k, top_p)
    sizes = {"VOCAB": vocab, "PARTS": parts, "PARTS_PADDED": parts_padded}
    grid, blocks = (rows, parts), {"BLOCK": _BLOCK, "RUN": _RUN}
    _peaks_kernel[grid](
        logits, slots, temperature, peaks, masses, stride, VOCAB=vocab, **blocks, num_warps=8
    )
    for level in range(2):
        _sums_kernel[grid](
            logits, slots, *settings, peaks, masses, best, total, bound, sums, stride,
            LEVEL=level, **sizes, **blocks, num_warps=8,
        )  # fmt: skip
    _gather_kernel[grid](
        logits, slots, *settings, best, total, bound, sums, least, above, candidates, counts,
        stride, **sizes, BLOCK=_BLOCK, ROOM=_ROOM, num_warps=8,
    )  # fmt: skip
    _threshold_kernel[(rows,)](
        logits, slots, *settings, min_p, best, total, least, above, candidates, counts, threshold,
        stride, **sizes, ROOM=_ROOM, TILE=4096, num_warps=16,
    )  # fmt: skip
    return best, threshold
