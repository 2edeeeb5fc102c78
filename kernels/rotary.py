"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split form of GPT-NeoX."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x with the leading 2r dimensions of each head rotated, pairs being (i, i + r).

    Args:
        x: [tokens, heads, head_dim]
        cos, sin: [tokens, r], in x's dtype
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
