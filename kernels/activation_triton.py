"""The gated activation for CUDA, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mii.kernels.activation import ActivationName

_BLOCK = 1024


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    output_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    if KIND == "silu":
        active = wide / (1.0 + tl.exp(-wide))
    elif KIND == "gelu":
        active = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    tl.store(output_ptr + row * SIZE + columns, active.to(gate.dtype) * up, mask=mask)


def gated_activation_cuda(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Compute `gated_activation_reference` for a contiguous [tokens, 2 * size]."""
    tokens, double = gate_up.shape
    size = double // 2
    output = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _gated_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            gate_up,
            output,
            SIZE=size,
            BLOCK=_BLOCK,
            KIND=activation,
            num_warps=4,
        )
    return output
