"""Matrix products with a weight that never changes."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F


class PackedLinear:
    """y = x @ weight.T + bias, with the weight laid out once for the device.

    On a CPU in fp32, oneDNN's own layout is much faster for few rows than what `F.linear` does
    with a plain weight: all linears of a SmolLM2-135M step on 2 cores (AVX2) take 26 ms instead of
    41 for 1 row, 47 instead of 76 for 8, 88 instead of 134 for 32, and the same for 512.

    Args:
        weight: [out, in]
        bias: [out] or None
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._packed = self._packed and _onednn_packs()
        self._weight = _pack(weight) if self._packed else weight

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias, if the weight is laid out as it was given."""
        return None if self._packed else (self._weight, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] for x [rows, in]."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] <= _MOST_ROWS:
            return self._padded(x)
        return torch.cat([self._padded(part) for part in x.split(_MOST_ROWS)])

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        size = _padded_rows(rows)
        if size == rows:
            return _packed_linear(x, self._weight, self._bias)
        x = F.pad(x, (0, 0, 0, size - rows))
        return _packed_linear(x, self._weight, self._bias)[:rows]


# oneDNN compiles a program for every number of rows that it meets, and keeps it: 0.7 MB for each
# and each shape of weight. So few numbers are used, and more rows are cut up.
_MOST_ROWS = 512
_STEPS = (
    (4, 1),
    (16, 4),
    (64, 8),
    (128, 16),
    (256, 32),
    (512, 64),
)  # up to so many rows, in steps of so many


def _padded_rows(rows: int) -> int:
    """Return the number of rows that a product of `rows` rows is computed with."""
    step = next(step for limit, step in _STEPS if rows <= limit)
    return -(-rows // step) * step


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@cache
def _onednn_packs() -> bool:
    """Whether this build of torch has the packed product, and it is right."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x, bias = torch.randn(48, 40), torch.randn(3, 40), torch.randn(48)
    try:
        y = _packed_linear(x, _pack(weight), bias)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(y, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
