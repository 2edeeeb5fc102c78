"""The attention block: projections around an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mii.attention.base import AttentionBackend, AttentionLayer
from mii.kernels.rotary import rotate
from mii.layers.linear import ColumnLinear, RowLinear
from mii.layers.norm import RMSNorm


@dataclass(frozen=True)
class AttentionBlock:
    """This rank's heads of one layer."""

    layer: AttentionLayer
    num_heads: int  # of this rank
    num_kv_heads: int
    head_dim: int
    qkv: ColumnLinear
    output: RowLinear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None

    def __call__(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden].

        Args:
            x: the normalised hidden states.
            rotary: cosines and sines of the tokens; None: no position embedding.
            backend: holds the cache.
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        heads = (self.num_heads, self.num_kv_heads)
        query, key, value = qkv.split((*heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
            if rotary is not None:
                query, key = rotate(query, *rotary), rotate(key, *rotary)
        elif rotary is not None:
            query, key = rotate(qkv[:, : sum(heads)], *rotary).split(heads, dim=1)
        return self.output(backend.attend(self.layer, query, key, value).flatten(1))
