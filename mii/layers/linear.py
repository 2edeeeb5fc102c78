"""Linear layers with their share of a weight, packed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mii.kernels.linear import PackedLinear
from mii.parallel.group import ParallelGroup


class ColumnLinear:
    """y = x W' + b, where this rank holds some of the output columns. Several weights may be fused.

    Args:
        weights: [out_i, in] each, this rank's rows
        biases: [out_i] each, or none at all
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()
    ) -> None:
        self._linear = PackedLinear(
            torch.cat(list(weights)), torch.cat(list(biases)) if biases else None
        )

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight [sum of out_i, in] and bias, if the weight is laid out plainly."""
        return self._linear.plain

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, sum of out_i]."""
        return self._linear(x)


class RowLinear:
    """y = sum over ranks of x W' + b, where this rank holds some of the input columns.

    Args:
        weight: [out, in], this rank's columns
        bias: [out], which only rank 0 adds
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, group: ParallelGroup
    ) -> None:
        self._linear = PackedLinear(weight, bias if group.rank == 0 else None)
        self._group = group

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight [out, in] and bias, if this rank has all of it and it is laid out plainly."""
        return self._linear.plain if self._group.size == 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out]."""
        return self._group.all_reduce(self._linear(x))


class VocabularyHead:
    """Logits over the whole vocabulary, of which this rank computes some columns.

    Args:
        weight: [rows of this rank, hidden]
        widths: rows of every rank
    """

    def __init__(self, weight: torch.Tensor, widths: tuple[int, ...], group: ParallelGroup) -> None:
        self._linear = PackedLinear(weight)
        self._widths = widths
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary]."""
        return self._group.gather_columns(self._linear(x), self._widths)
