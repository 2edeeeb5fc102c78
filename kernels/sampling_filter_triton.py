"""Finding the least logit that top_k, top_p and min_p keep, on a GPU, without a sort.

Hardly any token of a vocabulary can be among those that are kept, and two bounds tell which: top_k
keeps nothing below the k-th greatest of the peaks of runs of tokens; top_p nothing so improbable
that all such tokens together have less than 1 - top_p. What is above is gathered, and the least
kept logit found among it by its bits, four at a time. Sums are taken in a fixed order for each row,
whatever runs beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits of one program
_RUN = 128  # logits that share a peak
_ROOM = 512  # logits that are gathered from one block; if there are more, none are gathered


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
def _gather_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peak_ptr,
    mass_ptr,
    best_ptr,
    total_ptr,
    candidate_ptr,
    count_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Gather the scaled logits of a block that could be kept: candidate [row, ROOM, part]."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    if temperature <= 0.0:
        return
    runs: tl.constexpr = BLOCK // RUN
    number = tl.arange(0, PARTS_PADDED * runs)
    peak_row = peak_ptr + index * PARTS * runs
    peaks = tl.load(peak_row + number, number < PARTS * runs, other=float("-inf"))
    best = tl.max(peaks, 0)
    parts = tl.arange(0, PARTS_PADDED)
    masses = tl.load(mass_ptr + index * PARTS + parts, parts < PARTS, other=0.0)
    block_peaks = tl.max(tl.reshape(peaks, (PARTS_PADDED, runs)), 1)
    total = tl.sum(masses * tl.exp((block_peaks - best) / temperature), 0)
    if part == 0:
        tl.store(best_ptr + index, best)
        tl.store(total_ptr + index, total)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    if has_top_k | (top_p < 1.0):
        if has_top_k:
            bound = (_bound_of_top_k(peaks, top_k) - best) / temperature
        else:
            bound = tl.log(0.999 * (1.0 - top_p) * total / VOCAB)
        columns = part * BLOCK + tl.arange(0, BLOCK)
        row = logits_ptr + index.to(tl.int64) * stride
        z = scaled_logits(row, columns, VOCAB, best, temperature)
        is_candidate = ((z >= bound) & (columns < VOCAB)).to(tl.int32)
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
def _least_kept(
    least,
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
    """Return the greatest key that has as much as `wanted` at or above it, and their weight.

    Candidates below the key `least` do not count, the others by number or by weight.
    """
    digits = tl.arange(0, 16).to(tl.uint32)
    low = tl.full([], 0, tl.uint32)
    mass = tl.full([], 0.0, tl.float32)
    for digit in range(8):
        trials = low | (digits << (28 - 4 * digit))
        sums = tl.zeros([16], tl.float32)
        masses = tl.zeros([16], tl.float32)
        for start in range(0, limit, TILE):
            z, exists = _candidates(
                start + tl.arange(0, TILE), whole, row, best, temperature, candidate_ptr,
                count_ptr, VOCAB, PARTS, PARTS_PADDED,
            )  # fmt: skip
            keys = _ordered(z)
            counts = (exists & (keys >= least))[:, None] & (keys[:, None] >= trials[None, :])
            masses += tl.sum(tl.where(counts, tl.exp(z)[:, None], 0.0), 0)
            if BY_NUMBER:
                sums += tl.sum(counts.to(tl.float32), 0)
        if not BY_NUMBER:
            sums = masses
        # No key is above that of the best, whose scaled logit is 0.
        fits = (sums >= wanted) & (trials <= 0x80000000)
        low = tl.max(tl.where(fits, trials, low), 0)
        mass = tl.max(tl.where(trials == low, masses, 0.0), 0)
    return low, mass


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
        row = logits_ptr + index.to(tl.int64) * stride
        candidates = candidate_ptr + index.to(tl.int64) * ROOM * PARTS_PADDED
        counts = count_ptr + index * PARTS_PADDED
        parts = tl.arange(0, PARTS_PADDED)
        most = tl.max(tl.load(counts + parts, parts < PARTS, other=0), 0)
        whole = most > ROOM
        limit = tl.where(whole, VOCAB, most * PARTS_PADDED)
        if has_top_k:
            low, total = _least_kept(
                low, top_k, whole, limit, row, best, temperature, candidates, counts,
                True, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
        if top_p < 1.0:
            least, _ = _least_kept(
                low, top_p * total, whole, limit, row, best, temperature, candidates, counts,
                False, VOCAB, PARTS, PARTS_PADDED, TILE,
            )  # fmt: skip
            low = tl.maximum(low, least)
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

    best, total, threshold = floats(rows), floats(rows), floats(rows)
    peaks, masses = floats(rows, parts, _BLOCK // _RUN), floats(rows, parts)
    candidates = floats(rows, _ROOM, parts_padded)
    counts = torch.empty((rows, parts_padded), dtype=torch.int32, device=device)
    stride, settings = logits.stride(0), (temperature, top_k, top_p)
    sizes = {"PARTS": parts, "PARTS_PADDED": parts_padded, "ROOM": _ROOM}
    blocks = {"BLOCK": _BLOCK, "RUN": _RUN}
    _peaks_kernel[(rows, parts)](
        logits, slots, temperature, peaks, masses, stride, VOCAB=vocab, **blocks, num_warps=8
    )
    _gather_kernel[(rows, parts)](
        logits,
        slots,
        *settings,
        peaks,
        masses,
        best,
        total,
        candidates,
        counts,
        stride,
        VOCAB=vocab,
        **sizes,
        **blocks,
        num_warps=8,
    )
    _threshold_kernel[(rows,)](
        logits,
        slots,
        *settings,
        min_p,
        best,
        total,
        candidates,
        counts,
        threshold,
        stride,
        VOCAB=vocab,
        **sizes,
        TILE=512,
        num_warps=8,
    )
    return best, threshold
