"""Drawing the next token on a GPU, without a sort. `sampling.py` says what is drawn, and why so.

Two passes over the logits. The first, for rows that filter, finds the least logit that top_k, top_p
and min_p keep, by bisection over the ordered bits of fp32. The second adds the noise and takes the
greatest. Ties with the least kept logit are all kept, where the reference takes the first of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _ordered(x):
    """Map fp32 to uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _logits(row, columns, vocab, best, temperature):
    x = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(temperature > 0.0, (x - best) / tl.maximum(temperature, 1e-30), x)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    threshold_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    row = logits_ptr + index.to(tl.int64) * stride
    threshold = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0.0, tl.float32)
    if temperature > 0.0:
        greatest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(row + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
            greatest = tl.maximum(greatest, tl.where(x != x, float("-inf"), x))
        best = tl.max(greatest, 0)
        low = tl.full([], 0, tl.uint32)  # ordered bits of a logit that is kept for certain
        if (top_k > 0) & (top_k < VOCAB):
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                trial = low | bit
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, VOCAB, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    keys = _ordered(_logits(row, columns, VOCAB, best, temperature))
                    count += ((keys >= trial) & (columns < VOCAB)).to(tl.int32)
                low = tl.where(tl.sum(count, 0) >= top_k, trial, low)
                bit = bit >> 1
        if top_p < 1.0:
            least = low
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, VOCAB, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                x = _logits(row, columns, VOCAB, best, temperature)
                sums += tl.where(_ordered(x) >= least, tl.exp(x), 0.0)
            wanted = top_p * tl.sum(sums, 0)
            low = tl.full([], 0, tl.uint32)
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                trial = low | bit
                sums = tl.zeros([BLOCK], tl.float32)
                for start in range(0, VOCAB, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    x = _logits(row, columns, VOCAB, best, temperature)
                    keys = _ordered(x)
                    sums += tl.where((keys >= trial) & (keys >= least), tl.exp(x), 0.0)
                low = tl.where((tl.sum(sums, 0) >= wanted) & (trial <= 0x80000000), trial, low)
                bit = bit >> 1
            low = tl.maximum(low, least)
        # The inverse of _ordered.
        bits = tl.where(low >> 31 != 0, low & 0x7FFFFFFF, ~low)
        threshold = tl.where(low == 0, float("-inf"), bits.to(tl.float32, bitcast=True))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, tl.log(min_p))
    tl.store(best_ptr + index, best)
    tl.store(threshold_ptr + index, threshold)


@triton.jit
def _log(x, less_one, has_less_one: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    numerator = m - 1.0
    if has_less_one:
        numerator = tl.where(exponent == 0, less_one, numerator)
    s = tl.div_rn(numerator, m + 1.0)
    square = s * s
    series = square * 0.1111111111111111 + 0.14285714285714285
    series = series * square + 0.2
    series = series * square + 0.3333333333333333
    log_m = (series * square + 1.0) * s * 2.0
    return exponent.to(tl.float32) * 0.6931471805599453 + log_m


@triton.jit
def _gumbel(bits):
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.maximum(1.0 - v, 2.9802322387695312e-08)
    exponential = -_log(u, tl.where(v < 0.25, -v, u - 1.0), True)
    return -_log(exponential, exponential, False)


@triton.jit
def _greatest_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    best_ptr,
    threshold_ptr,
    value_ptr,
    token_ptr,
    stride,
    parts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + index)
    temperature = tl.load(temperature_ptr + slot)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    row = logits_ptr + index.to(tl.int64) * stride
    best = tl.load(best_ptr + index)
    x = _logits(row, columns, VOCAB, best, temperature)
    if temperature > 0.0:
        threshold = tl.load(threshold_ptr + index)
        seed = tl.load(seed_ptr + slot)
        quarter: tl.constexpr = BLOCK // 4
        groups = (part * quarter + tl.arange(0, quarter)).to(tl.uint32)
        nothing = groups * 0
        position = nothing + tl.load(position_ptr + index).to(tl.uint32)
        choice = nothing + tl.load(choice_ptr + slot).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, groups, position, choice, nothing)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        x = tl.where(x >= threshold, x + _gumbel(words), float("-inf"))
    value, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_ptr + index * parts + part, value)
    tl.store(token_ptr + index * parts + part, part * BLOCK + place)


@triton.jit
def _join_kernel(value_ptr, token_ptr, output_ptr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    index = tl.program_id(0)
    parts = tl.arange(0, PARTS_PADDED)
    mask = parts < PARTS
    values = tl.load(value_ptr + index * PARTS + parts, mask=mask, other=float("-inf"))
    _, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(token_ptr + index * PARTS + place)
    tl.store(output_ptr + index, tl.minimum(token, 0x7FFFFFFF).to(tl.int64))


class SlotSampling:
    """How each slot's tokens are drawn: tensors on the device, indexed by slot."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.choice = torch.zeros(slots, dtype=torch.int32, device=device)


def draw_tokens_cuda(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    *,
    greedy: bool = False,
) -> torch.Tensor:
    """Draw one token from each row; nothing is read by the host.

    Args:
        logits: [rows, vocabulary], any float dtype, columns contiguous
        slots: int64 [rows], each row's place in `sampling`
        positions: int64 [rows], tokens of the answer before this one
        sampling: the settings; temperature 0 takes the greatest logit
        greedy: all rows have temperature 0

    Returns:
        int64 [rows]
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    device = logits.device
    best = torch.empty(rows, dtype=torch.float32, device=device)
    threshold = torch.empty(rows, dtype=torch.float32, device=device)
    values = torch.empty(rows * parts, dtype=torch.float32, device=device)
    tokens = torch.empty(rows * parts, dtype=torch.int32, device=device)
    output = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return output
    if not greedy:
        _threshold_kernel[(rows,)](
            logits,
            slots,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            best,
            threshold,
            logits.stride(0),
            VOCAB=vocab,
            BLOCK=_BLOCK,
            num_warps=16,
        )
    _greatest_kernel[(rows, parts)](
        logits,
        slots,
        sampling.temperature,
        sampling.seed,
        sampling.choice,
        positions,
        best,
        threshold,
        values,
        tokens,
        logits.stride(0),
        parts,
        VOCAB=vocab,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _join_kernel[(rows,)](
        values, tokens, output, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts)
    )
    return output
