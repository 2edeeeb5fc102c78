"""A layer for a single row on a GPU: four products, each in one pass with what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mii.attention.base import AttentionBackend, Rotary
from mii.layers.attention import AttentionBlock
from mii.layers.mlp import GatedMLP
from mii.layers.norm import RMSNorm


@dataclass(frozen=True)
class OneRowLayer:
    """A layer's parts, of which `fits_one_row` is true."""

    attention_norm: RMSNorm
    attention: AttentionBlock
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self, residual: torch.Tensor, rotary: Rotary | None, backend: AttentionBackend
    ) -> torch.Tensor:
        """Return the residual after the layer, [1, hidden], for the one before it.

        Args:
            rotary, backend: see `AttentionBlock`.
        """
        from mii.kernels.linear_triton import one_row_linear

        attention, mlp = self.attention, self.mlp
        assert attention.qkv.plain and attention.output.plain and mlp.down.plain
        assert mlp.gate_up.plain
        qkv = one_row_linear(residual, *attention.qkv.plain, norm=self.attention_norm.parameters)
        qkv = qkv.view(1, -1, attention.layer.head_dim)
        attended = backend.attend(attention.layer, qkv, rotary).flatten(1)
        residual = one_row_linear(attended, *attention.output.plain, residual=residual)
        gated = one_row_linear(
            residual, *mlp.gate_up.plain, norm=self.mlp_norm.parameters, gated=True
        )
        return one_row_linear(gated, *mlp.down.plain, residual=residual)


def fits_one_row(attention: AttentionBlock, mlp: GatedMLP) -> bool:
    """Whether the products can do what surrounds them, and have the weights as they were given."""
    from mii.kernels.linear_triton import MAX_INNER

    for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
        if linear.plain is None or linear.plain[0].shape[1] > MAX_INNER:
            return False
        if linear is mlp.gate_up and linear.plain[1] is not None:
            return False
    return mlp.activation == "silu"
