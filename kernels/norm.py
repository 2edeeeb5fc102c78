"""RMSNorm (Zhang and Sennrich, 2019), alone and after a residual addition."""

from __future__ import annotations

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in x's dtype.

    The mean is taken in fp32. As in transformers, a weight without offset multiplies after the
    result was rounded to x's dtype, a weight with offset (Gemma's) before.

    Args:
        x: [..., size]
        weight: [size]
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Compute `rms_norm_reference`."""
    if x.is_cuda and x.dim() == 2:
        from mii.kernels.norm_triton import rms_norm_cuda

        return rms_norm_cuda(x, None, weight, eps, offset)
    if x.dtype == torch.float32 and not offset:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return rms_norm_reference(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(residual + x), residual + x). May overwrite `residual`."""
    if x.is_cuda:
        from mii.kernels.norm_triton import rms_norm_cuda

        return rms_norm_cuda(x, residual, weight, eps, offset), residual
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps, offset), residual
