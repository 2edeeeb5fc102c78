"""The one interface behind which attention is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mii.attention.batch import RaggedBatch

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KVCacheShape:
    """One rank's share of the keys and values."""

    num_layers: int
    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over each head of q and k."""

    query: torch.Tensor  # [head_dim]
    key: torch.Tensor  # [head_dim]
    eps: float
    offset: float


@dataclass(frozen=True)
class AttentionLayer:
    """What may differ from layer to layer, and this rank's heads."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None
    norms: HeadNorms | None  # applied before the rotation


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
        self, layer: AttentionLayer, qkv: torch.Tensor, rotary: Rotary | None
    ) -> torch.Tensor:
        """Normalise and rotate q and k, write k and v into their slots, then attend causally.

        Args:
            layer: which layer.
            qkv: [T, heads + 2 * kv_heads, head_dim], contiguous; may be overwritten.
            rotary: cosines and sines, [T, r] each; None: no rotation.

        Returns:
            [T, heads, head_dim], contiguous
        """
        ...


def bytes_per_block(shape: KVCacheShape, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers, keys and values together."""
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    return per_token * shape.block_size * dtype.itemsize
