"""The attention block: projections around an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mii.attention.base import AttentionBackend, AttentionLayer, Rotary
from mii.layers.linear import ColumnLinear, RowLinear


@dataclass(frozen=True)
class AttentionBlock:
    """This rank's heads of one layer."""

    layer: AttentionLayer
    qkv: ColumnLinear
    output: RowLinear

    def __call__(
        self, x: torch.Tensor, rotary: Rotary | None, backend: AttentionBackend
    ) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden].

        Args:
            x: the normalised hidden states.
            rotary: cosines and sines of the tokens; None: no position embedding.
            backend: holds the cache.
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.layer.head_dim)
        return self.output(backend.attend(self.layer, qkv, rotary).flatten(1))
