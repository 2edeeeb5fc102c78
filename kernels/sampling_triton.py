"""Drawing the next token on a GPU, without a sort. `sampling.py` says what is drawn, and why so.

For rows that filter, `sampling_filter_triton.py` finds the least logit that is kept. Then the noise
is added and the greatest taken. Ties with the least kept logit are all kept, where the reference
takes the first of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mii.kernels.sampling_bounds_triton import scaled_logits
from mii.kernels.sampling_filter_triton import find_thresholds

_BLOCK = 1024  # logits of one program


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
    best = 0.0
    threshold = float("-inf")
    if temperature > 0.0:
        best = tl.load(best_ptr + index)
        threshold = tl.load(threshold_ptr + index)
        if tl.abs(best) == float("inf"):  # as if greedy
            best = 0.0
            temperature = 0.0
            threshold = float("-inf")
    x = scaled_logits(row, columns, VOCAB, best, temperature)
    is_kept = x >= threshold
    # Noise is dear, and few blocks have a token that is kept.
    if (temperature > 0.0) & (tl.max(is_kept.to(tl.int32), 0) > 0):
        seed = tl.load(seed_ptr + slot)
        quarter: tl.constexpr = BLOCK // 4
        groups = (part * quarter + tl.arange(0, quarter)).to(tl.uint32)
        nothing = groups * 0
        position = nothing + tl.load(position_ptr + index).to(tl.uint32)
        choice = nothing + tl.load(choice_ptr + slot).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, groups, position, choice, nothing)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        x += _gumbel(words)
    x = tl.where(is_kept, x, float("-inf"))
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
    values = torch.empty(rows * parts, dtype=torch.float32, device=device)
    tokens = torch.empty(rows * parts, dtype=torch.int32, device=device)
    output = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return output
    best = threshold = values  # not read where all are greedy
    if not greedy:
        best, threshold = find_thresholds(
            logits, slots, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
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
        num_warps=4,
        enable_fp_fusion=False,
    )
    _join_kernel[(rows,)](
        values, tokens, output, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts)
    )
    return output
