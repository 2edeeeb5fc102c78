"""The packed product equals the plain one for any number of rows, and keeps few programs."""

from __future__ import annotations

import pytest
import torch

from mii.kernels.linear import PackedLinear, _padded_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 63, 130, 256, 257, 600])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight, shift = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype)
    x = torch.randn(rows, 48).to(dtype)
    actual = PackedLinear(weight, shift if bias else None)(x)
    expected = x.double() @ weight.double().t() + (shift.double() if bias else 0)
    assert actual.shape == (rows, 70)
    torch.testing.assert_close(
        actual.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-1
    )


def test_few_numbers_of_rows_are_computed_with_and_little_is_added() -> None:
    sizes = {_padded_rows(rows) for rows in range(1, 257)}
    assert len(sizes) < 24
    assert all(rows <= _padded_rows(rows) <= max(4, 1.4 * rows + 3) for rows in range(1, 257))
