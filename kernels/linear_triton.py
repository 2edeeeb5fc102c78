"""Matrix products of few rows on a GPU, where reading the weight is all that counts.

One program takes some output columns and the whole inner dimension, so nothing has to be joined
afterwards; what usually surrounds such a product is done in the same pass: the norm before it, the
gated activation or the residual addition after it. A decode step then has six kernels a layer.

A program that is launched early asks for its weights before it waits, so that memory is busy while
the kernel before still runs: for one row it loads them into registers, for more into the
second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mii.kernels.early_launch import launch_options, let_next_start, wait_for_earlier

MAX_ROWS = 16
_MAX_INNER_OF_ONE_ROW = 32768  # a row of the weight and x lie in one program's registers


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    output_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    k = tl.arange(0, K_PADDED)
    in_k = k < K
    for block in tl.static_range(BLOCKS):
        column = (tl.program_id(0) * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Beyond N the last row again: its products are not stored.
        rows = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(rows, in_k[None, :], other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(rows + N * K, in_k[None, :], other=0.0, eviction_policy="evict_first")
        if block == 0:
            wait_for_earlier(EARLY)
            x = tl.load(x_ptr + k, in_k, other=0.0).to(tl.float32)
            if HAS_NORM:
                gain = OFFSET + tl.load(norm_ptr + k, in_k, other=0.0).to(tl.float32)
                x = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * gain
        y = tl.sum(w.to(tl.float32) * x[None, :], 1)
        in_columns = column < N
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, in_columns, other=0.0).to(tl.float32)
        if GATED:
            y = y / (1.0 + tl.exp(-y)) * tl.sum(up.to(tl.float32) * x[None, :], 1)
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + column, in_columns, other=0.0).to(tl.float32)
        tl.store(output_ptr + column, y.to(output_ptr.dtype.element_ty), in_columns)


@triton.jit
def _prefetch(weight_rows, COLUMNS: tl.constexpr):
    """Ask for the first columns of each row, line of 128 bytes by line."""
    line: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth
    pointers = weight_rows + (tl.arange(0, COLUMNS // line) * line)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    output_ptr,
    rows,
    eps,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = columns < N
    # Beyond N the last row again: its products are not stored.
    w_rows = weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    if EARLY and PREFETCH > 0:
        _prefetch(w_rows, PREFETCH)
        if GATED:
            _prefetch(w_rows + N * K, PREFETCH)
    wait_for_earlier(EARLY)

    m = tl.arange(0, BLOCK_M)
    in_rows = m < rows
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m[:, None] * x_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + k
        in_inner = inner < K
        mask = in_inner[None, :]
        w = tl.load(w_rows + inner[None, :], mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + inner[None, :], in_rows[:, None] & mask, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            gain = OFFSET + tl.load(norm_ptr + inner, in_inner, other=0.0).to(tl.float32)
            x = (wide * gain[None, :]).to(x.dtype)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            up = w_rows + N * K + inner[None, :]
            w = tl.load(up, mask, other=0.0, eviction_policy="evict_first")
            up_acc = tl.dot(x, tl.trans(w), up_acc, input_precision="ieee")
    if HAS_NORM:
        factor = tl.rsqrt(squares / K + eps)[:, None]
        acc = acc * factor
        up_acc = up_acc * factor
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    offsets = m[:, None] * N + columns[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + offsets, acc.to(output_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class OneRowSettings:
    """Launch settings for one row."""

    block_n: int = 4  # rows of the weight that a program holds at a time; half as many when gated
    blocks: int = 1  # how many times
    columns_per_thread: int = 32


@dataclass(frozen=True)
class FewRowsSettings:
    """Launch settings for more rows."""

    block_n: int = 16
    block_k: int = 256
    warps: int = 4
    stages: int = 4
    prefetch: int = 1024  # columns of the weight that an early program asks for at once


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    one_row: OneRowSettings | None = None,
    few_rows: FewRowsSettings | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Return norm(x) @ weight.T + bias, then gated or added to a residual.

    Args:
        x: [rows, in], at most `MAX_ROWS` rows, columns contiguous
        weight: [out, in], contiguous; when gated, [2 * out, in], the gate's rows first
        bias: [out]; not when gated
        norm: weight [in], eps and offset of an RMSNorm over x; it is applied around the product, so
            that x is not rounded in between
        residual: [rows, out], contiguous, added to the result
        gated: return silu(gate) * up
        one_row, few_rows: launch settings
        early: launch early, see `mii.kernels.early_launch`

    Returns:
        [rows, out] in x's dtype
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    output = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return output
    norm_weight, eps, offset = norm if norm is not None else (x, 0.0, 0.0)
    tensors = (
        x,
        weight,
        bias if bias is not None else x,
        norm_weight,
        residual if residual is not None else x,
        output,
    )
    constants = {
        "N": n,
        "K": k,
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm is not None,
        "OFFSET": offset,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        **launch_options(early),
    }
    if rows == 1 and k <= _MAX_INNER_OF_ONE_ROW:
        one_row = one_row or OneRowSettings()
        block_n = max(1, one_row.block_n // 2) if gated else one_row.block_n
        k_padded = triton.next_power_of_2(k)
        _one_row_kernel[(triton.cdiv(n, block_n * one_row.blocks),)](
            *tensors,
            eps,
            K_PADDED=k_padded,
            BLOCK_N=block_n,
            BLOCKS=one_row.blocks,
            num_warps=min(16, max(1, k_padded // one_row.columns_per_thread // 32)),
            **constants,
        )
    else:
        few_rows = few_rows or FewRowsSettings()
        _few_rows_kernel[(triton.cdiv(n, few_rows.block_n),)](
            *tensors,
            rows,
            eps,
            x.stride(0),
            BLOCK_M=16,
            BLOCK_N=few_rows.block_n,
            BLOCK_K=few_rows.block_k,
            PREFETCH=min(few_rows.prefetch, 1 << (k.bit_length() - 1)),
            num_warps=few_rows.warps,
            num_stages=few_rows.stages,
            **constants,
        )
    return output
