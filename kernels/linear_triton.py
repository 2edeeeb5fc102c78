"""Matrix products of few rows on a GPU, where reading the weight is all that counts.

One program takes some output columns and the whole inner dimension, so nothing has to be joined
afterwards; what usually surrounds such a product is done in the same pass: the norm before it, the
gated activation or the residual addition after it. A decode step then has six kernels a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16


@triton.jit
def _dot_rows(x, w, acc):
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
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
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = columns < N
    m = tl.arange(0, BLOCK_M)
    in_rows = m < rows
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m[:, None] * x_stride
    w_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + k
        in_inner = inner < K
        mask = in_columns[:, None] & in_inner[None, :]
        w = tl.load(w_rows + inner[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + inner[None, :], mask=in_rows[:, None] & in_inner[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            gain = OFFSET + tl.load(norm_ptr + inner, mask=in_inner, other=0.0).to(tl.float32)
            x = (wide * gain[None, :]).to(x.dtype)
        acc = _dot_rows(x, w, acc)
        if GATED:
            up = w_rows + N * K + inner[None, :]
            w = tl.load(up, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc = _dot_rows(x, w, up_acc)
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
class SkinnySettings:
    """Launch settings."""

    block_n: int = 16
    block_k: int = 256
    warps: int = 4
    stages: int = 4


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    settings: SkinnySettings | None = None,
) -> torch.Tensor:
    """Return norm(x) @ weight.T + bias, then gated or added to a residual.

    Args:
        x: [rows, in], at most `MAX_ROWS` rows, columns contiguous
        weight: [out, in], contiguous; when gated, [2 * out, in], the gate's rows first
        bias: [out]; not when gated
        norm: weight [in], eps and offset of an RMSNorm over x; it is applied around the product, so
            that x is not rounded in between
        residual: [rows, out], added to the result
        gated: return silu(gate) * up
        settings: launch settings

    Returns:
        [rows, out] in x's dtype
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    settings = settings or SkinnySettings()
    output = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    norm_weight, eps, offset = norm if norm is not None else (x, 0.0, 0.0)
    _skinny_kernel[(triton.cdiv(n, settings.block_n),)](
        x,
        weight,
        bias if bias is not None else x,
        norm_weight,
        residual if residual is not None else x,
        output,
        rows,
        eps,
        x.stride(0),
        N=n,
        K=k,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        OFFSET=offset,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_M=16,
        BLOCK_N=settings.block_n,
        BLOCK_K=settings.block_k,
        num_warps=settings.warps,
        num_stages=settings.stages,
    )
    return output
