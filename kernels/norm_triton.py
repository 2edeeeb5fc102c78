"""RMSNorm for CUDA: one program a row, the residual addition in the same pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    output_ptr,
    x_stride,
    eps,
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + row * SIZE + columns, mask=mask, other=0.0)
        tl.store(residual_ptr + row * SIZE + columns, x, mask=mask)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if OFFSET != 0.0:
        out = (normed * (OFFSET + weight.to(tl.float32))).to(x.dtype)
    else:
        out = weight * normed.to(x.dtype)
    tl.store(output_ptr + row * SIZE + columns, out, mask=mask)


def rms_norm_cuda(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """Return the norm of x, or of residual + x, which then replaces `residual`.

    Args:
        x: [rows, size], the columns contiguous
        residual: [rows, size], contiguous, or None
        weight: [size]
    """
    rows, size = x.shape
    output = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            output,
            x.stride(0),
            eps,
            OFFSET=offset,
            SIZE=size,
            SIZE_PADDED=padded,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(1, padded // 512)),
        )
    return output
