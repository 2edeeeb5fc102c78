"""Finding the least logit that top_k, top_p and min_p keep, on a GPU, without a sort.

`sampling_bounds_triton.py` gathers the few logits of a row that could be it. It is found among them
by bisection. Sums are taken in a fixed order for each row, whatever runs beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mii.kernels.sampling_bounds_triton import (
    EDGES,
    from_ordered,
    gather_kernel,
    ordered,
    peaks_kernel,
    scaled_logits,
    sums_kernel,
)

_BLOCK = 4096  # logits of one program
_RUN = 128  # logits that share a peak
_WARPS = 4
_ROOM = 512  # logits that are gathered from one block; if there are more, none are gathered
_ABOVE_BEST = tl.constexpr(0x80000001)  # a key greater than any scaled logit's: the best is 0


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
    keys,
    weights,
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
    """Return how many candidates are at or above a key, or their weight.

    Those of the first tile are given; there seldom are more.
    """
    sums = (keys >= key).to(tl.float32) if BY_NUMBER else tl.where(keys >= key, weights, 0.0)
    for start in range(TILE, limit, TILE):
        z, exists = _candidates(
            start + tl.arange(0, TILE), whole, row, best, temperature, candidate_ptr, count_ptr,
            VOCAB, PARTS, PARTS_PADDED,
        )  # fmt: skip
        counts = exists & (ordered(z) >= key)
        if BY_NUMBER:
            sums += counts.to(tl.float32)
        else:
            sums += tl.where(counts, tl.exp(z), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _least_kept(
    low,
    wanted,
    keys,
    weights,
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
    high = tl.full([], _ABOVE_BEST, tl.uint32)
    while high - low > 1:
        middle = low + (high - low) // 2
        found = _at_or_above(
            middle, keys, weights, whole, limit, row, best, temperature, candidate_ptr, count_ptr,
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
        low = ordered(tl.load(least_ptr + index))
        row = logits_ptr + index.to(tl.int64) * stride
        candidates = candidate_ptr + index.to(tl.int64) * ROOM * PARTS_PADDED
        counts = count_ptr + index * PARTS_PADDED
        parts = tl.arange(0, PARTS_PADDED)
        most = tl.max(tl.load(counts + parts, parts < PARTS, other=0), 0)
        whole = most > ROOM
        limit = tl.where(whole, VOCAB, most * PARTS_PADDED)
        above = tl.where(whole, 0.0, above)  # then they are among those that are weighed
        z, exists = _candidates(
            tl.arange(0, TILE), whole, row, best, temperature, candidates, counts,
            VOCAB, PARTS, PARTS_PADDED,
        )  # fmt: skip
        keys = tl.where(exists, ordered(z), 0)
        weights = tl.where(exists, tl.exp(z), 0.0)
        if has_top_k:
            low = _least_kept(
                low, top_k, keys, weights, whole, limit, row, best, temperature, candidates, counts,
                True, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
            total = _at_or_above(
                low, keys, weights, whole, limit, row, best, temperature, candidates, counts,
                False, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
        if top_p < 1.0:
            low = _least_kept(
                low, top_p * total - above, keys, weights, whole, limit, row, best, temperature,
                candidates, counts, False, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
    threshold = from_ordered(low)
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
    peaks = floats(rows, parts, _BLOCK // _RUN)
    block_peaks, masses = floats(rows, parts), floats(rows, parts)
    sums = floats(2, rows, parts, EDGES.value)
    candidates = floats(rows, _ROOM, parts_padded)
    counts = torch.empty((rows, parts_padded), dtype=torch.int32, device=device)
    stride, settings = logits.stride(0), (temperature, top_k, top_p)
    sizes = {"VOCAB": vocab, "PARTS": parts, "PARTS_PADDED": parts_padded}
    grid, blocks = (rows, parts), {"BLOCK": _BLOCK, "RUN": _RUN}
    peaks_kernel[grid](
        logits,
        slots,
        temperature,
        peaks,
        block_peaks,
        masses,
        stride,
        VOCAB=vocab,
        **blocks,
        num_warps=_WARPS,
    )
    for level in range(2):
        sums_kernel[grid](
            logits, slots, *settings, peaks, block_peaks, masses, best, total, bound, sums, stride,
            LEVEL=level, **sizes, **blocks, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    gather_kernel[grid](
        logits, slots, *settings, best, total, bound, sums, least, above, candidates, counts,
        stride, **sizes, BLOCK=_BLOCK, ROOM=_ROOM, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _threshold_kernel[(rows,)](
        logits, slots, *settings, min_p, best, total, least, above, candidates, counts, threshold,
        stride, **sizes, ROOM=_ROOM, TILE=8192, num_warps=16,
    )  # fmt: skip
    return best, threshold
