"""The small fused kernels equal their plain references."""

from __future__ import annotations

import pytest
import torch

from mii.kernels.activation import gated_activation_reference
from mii.kernels.activation_triton import gated_activation_cuda
from mii.kernels.norm import rms_norm_reference
from mii.kernels.norm_triton import rms_norm_cuda
from mii.kernels.rotary import rotate
from mii.kernels.rotary_triton import prepare_attention
from tests.kernels.cache import DEVICE, HALVES, TOLERANCE, error_of, poisoned

DTYPES = [torch.float32, *HALVES]

# numpy, which the interpreter computes with, warns where the GPU silently gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (5, 576), (0, 64)])
def test_norm_and_residual(rows: int, size: int, offset: float, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size, device=DEVICE).to(dtype)
    residual = torch.randn(rows, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    alone = rms_norm_cuda(x, None, weight, 1e-5, offset)
    assert error_of(alone, rms_norm_reference(x, weight, 1e-5, offset)) < TOLERANCE[dtype]
    total = residual + x
    fused = rms_norm_cuda(x, residual, weight, 1e-5, offset)
    assert error_of(residual, total) < TOLERANCE[dtype]
    assert error_of(fused, rms_norm_reference(total, weight, 1e-5, offset)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 10), (3, 1024), (2, 1536), (0, 8)])
def test_gated_activation(tokens: int, size: int, activation, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(tokens, 2 * size, device=DEVICE)).to(dtype)
    expected = gated_activation_reference(gate_up.double(), activation)
    assert error_of(gated_activation_cuda(gate_up, activation), expected) < TOLERANCE[dtype]


def test_gated_activation_of_extremes_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -88.0, 88.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        assert torch.isfinite(gated_activation_cuda(gate_up, activation)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, 0.0, 1.0])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (96, 16), (16, 0)])
def test_prepare_attention(
    head_dim: int, half: int, norm: float | None, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads, page = 5, 6, 2, 16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    query, key, value = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
    weights = torch.randn(2, head_dim, device=DEVICE).to(dtype)
    angles = torch.randn(tokens, half, device=DEVICE)
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype)) if half else None
    if norm is not None:
        query = rms_norm_reference(query, weights[0], 1e-6, norm)
        key = rms_norm_reference(key, weights[1], 1e-6, norm)
    if rotary:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    caches = poisoned(2, 4, kv_heads, page, head_dim, dtype=dtype)
    slots = torch.tensor([17, 3, 63, 0, 30], device=DEVICE)
    norms = (weights[0], weights[1]) if norm is not None else None
    result = prepare_attention(
        qkv, heads, rotary, norms, 1e-6, norm or 0.0, caches[0], caches[1], slots
    )
    assert error_of(result, query) < TOLERANCE[dtype]
    written = caches.transpose(2, 3).flatten(1, 2)
    assert error_of(written[0, slots], key) < TOLERANCE[dtype]
    assert error_of(written[1, slots], value) < TOLERANCE[dtype]
    untouched = torch.ones(64, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert written[:, untouched].isnan().all()
