"""The product of one row, with what surrounds it, equals plain fp64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from mii.kernels.linear_triton import MAX_INNER, OneRowSettings, one_row_linear
from tests.kernels.cache import DEVICE, HALVES, TOLERANCE, error_of, nan_in_new_tensors

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("k", "n", "blocks"), [(64, 16, 1), (300, 35, 2), (MAX_INNER - 5, 3, 2), (MAX_INNER, 9, 1)]
)
@pytest.mark.parametrize("kind", ["plain", "bias", "norm", "gemma", "residual", "gated"])
def test_equals_plain_arithmetic(
    kind: str, k: int, n: int, blocks: int, dtype: torch.dtype
) -> None:
    x = torch.randn(1, k, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * n if kind == "gated" else n, k, device=DEVICE) * k**-0.5).to(dtype)
    gain = torch.randn(k, device=DEVICE).to(dtype)
    extra = torch.randn(1, n, device=DEVICE).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype)
    offset = 1.0 if kind == "gemma" else 0.0
    normed = kind in ("norm", "gemma", "gated")
    wide = x.double()
    if normed:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        wide = wide * (offset + gain.double())
    expected = wide @ weight.double().t()
    if kind == "bias":
        expected = expected + bias.double()
    if kind == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    if kind == "residual":
        expected = expected + extra.double()
    with nan_in_new_tensors():
        actual = one_row_linear(
            x,
            weight,
            bias if kind == "bias" else None,
            norm=(gain, 1e-5, offset) if normed else None,
            residual=extra if kind == "residual" else None,
            gated=kind == "gated",
            settings=OneRowSettings(blocks=blocks),
        )
    assert actual.shape == (1, n)
    assert error_of(actual, expected) < TOLERANCE[dtype]
