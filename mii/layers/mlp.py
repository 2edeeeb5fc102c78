"""The gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mii.kernels.activation import ActivationName, gated_activation
from mii.layers.linear import ColumnLinear, RowLinear


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    gate_up: ColumnLinear
    down: RowLinear
    activation: ActivationName

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        return self.down(gated_activation(self.gate_up(x), self.activation))
