"""What a layer asks of the other ranks of its replica."""

from __future__ import annotations

from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """The ranks that share one model. Every rank must make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, bit for bit the same on each; may reuse `tensor`."""
        ...

    def gather_columns(self, tensor: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """Return [rows, sum(widths)]: the ranks' [rows, widths[rank]] side by side, on each."""
        ...

    def close(self) -> None:
        """Give back what the group holds. Safe to call twice."""
        ...


class SingleRank:
    """The group of a model that is not split."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_columns(self, tensor: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return
