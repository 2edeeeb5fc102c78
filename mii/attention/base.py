"""The one interface behind which attention is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mii.attention.batch import RaggedBatch


@dataclass(frozen=True)
class KVCacheShape:
    """One rank's share of the keys and values."""

    num_layers: int
    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionLayer:
    """What differs from layer to layer for the attention itself."""

    index: int
    scale: float
    window: int | None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None


class AttentionBackend(Protocol):
    """Holds the blocked KV cache of all layers and attends over it.

    Use: `allocate` once; then, for each step, `plan` once and `attend` once per layer.
    """

    def allocate(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the cache; `bytes_per_block` says beforehand how much it takes."""
        ...

    def plan(self, batch: RaggedBatch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the step's keys and values into their slots, then attend causally.

        Args:
            query: [T, heads, head_dim], rotated.
            key, value: [T, kv_heads, head_dim], the key rotated.

        Returns:
            [T, heads, head_dim]
        """
        ...


def bytes_per_block(shape: KVCacheShape, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers, keys and values together."""
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    return per_token * shape.block_size * dtype.itemsize
