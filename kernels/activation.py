"""The gated activation of an MLP (Shazeer, GLU Variants Improve Transformer, 2020)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

ActivationName = Literal["silu", "gelu", "gelu_pytorch_tanh"]


def gated_activation_reference(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Return act(gate) * up for gate_up = [gate | up].

    Args:
        gate_up: [tokens, 2 * size]

    Returns:
        [tokens, size]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up


def gated_activation(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Compute `gated_activation_reference`."""
    if gate_up.is_cuda:
        from mii.kernels.activation_triton import gated_activation_cuda

        return gated_activation_cuda(gate_up, activation)
    return gated_activation_reference(gate_up, activation)
