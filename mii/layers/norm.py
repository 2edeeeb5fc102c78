"""RMSNorm with its weight."""

from __future__ import annotations

import torch

from mii.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """See `mii.kernels.norm`."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        self._weight = weight
        self._eps = eps
        self._offset = offset

    @property
    def parameters(self) -> tuple[torch.Tensor, float, float]:
        """Weight [size], eps and offset."""
        return self._weight, self._eps, self._offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, over its last dimension."""
        return rms_norm(x, self._weight, self._eps, self._offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the normalised residual + x, residual + x); may overwrite `residual`."""
        return add_rms_norm(x, residual, self._weight, self._eps, self._offset)
