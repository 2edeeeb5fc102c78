"""The product of one row and a weight on a GPU, where reading the weight is all that counts.

One program takes some output columns and the whole inner dimension, so nothing has to be joined
afterwards; what usually surrounds such a product is done in the same pass: the norm before it, the
gated activation or the residual addition after it. A decode step of one sequence then has six
kernels a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_INNER = 16384  # a row of the weight and x lie in one program's registers


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
):
    k = tl.arange(0, K_PADDED)
    in_k = k < K
    for block in tl.static_range(BLOCKS):
        column = (tl.program_id(0) * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Beyond N the last row again: its products are not stored.
        rows = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(rows, in_k[None, :], other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(rows + N * K, in_k[None, :], other=0.0, eviction_policy="evict_first")
        if block == 0:  # after the weights were asked for, which take longest
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


@dataclass(frozen=True)
class OneRowSettings:
    """Launch settings."""

    block_n: int = 4  # rows of the weight that a program holds at a time; half as many when gated
    blocks: int = 1  # how many times
    columns_per_thread: int = 32


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    settings: OneRowSettings | None = None,
) -> torch.Tensor:
    """Return norm(x) @ weight.T + bias, then gated or added to a residual.

    Args:
        x: [1, in], contiguous; `in` is at most `MAX_INNER`
        weight: [out, in], contiguous; when gated, [2 * out, in], the gate's rows first
        bias: [out]; not when gated
        norm: weight [in], eps and offset of an RMSNorm over x; it is not rounded before the product
        residual: [1, out], contiguous, added to the result
        gated: return silu(gate) * up
        settings: launch settings

    Returns:
        [1, out] in x's dtype
    """
    rows, k = x.shape
    assert rows == 1 and k <= MAX_INNER and not (gated and bias is not None)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    output = torch.empty((1, n), dtype=x.dtype, device=x.device)
    norm_weight, eps, offset = norm if norm is not None else (x, 0.0, 0.0)
    settings = settings or OneRowSettings()
    block_n = max(1, settings.block_n // 2) if gated else settings.block_n
    k_padded = triton.next_power_of_2(k)
    _one_row_kernel[(triton.cdiv(n, block_n * settings.blocks),)](
        x,
        weight,
        bias if bias is not None else x,
        norm_weight,
        residual if residual is not None else x,
        output,
        eps,
        N=n,
        K=k,
        K_PADDED=k_padded,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        OFFSET=offset,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_N=block_n,
        BLOCKS=settings.blocks,
        num_warps=min(16, max(1, k_padded // settings.columns_per_thread // 32)),
    )
    return output
