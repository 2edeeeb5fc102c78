"""Writing keys and values into the blocked cache."""

from __future__ import annotations

import torch


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot.

    Args:
        key, value: [tokens, kv_heads, head_dim]
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim]
        slots: int64 [tokens], block * block_size + offset; distinct
    """
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)
