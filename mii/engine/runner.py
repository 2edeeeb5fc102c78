"""Runs a step's forward pass on this rank's share of the model."""

from __future__ import annotations

from typing import Protocol

import torch

from mii.attention.batch import RaggedBatch
from mii.engine.plan import StepPlan
from mii.engine.ragged import RaggedBatchWrapper
from mii.parallel.links import PlanSender


class CausalModel(Protocol):
    """What the engine asks of a model: one rank's share, with the KV cache of its heads."""

    vocab_size: int
    max_length: int  # tokens of one sequence at most
    head_dim: int
    static_length: int | None  # see DecoderSpec.static_length

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes that one block takes on this rank, all layers together."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make room for the keys and values of `num_blocks` blocks. Once."""
        ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute one step; return logits [L, vocab_size] of `batch.logits_rows`."""
        ...


class ModelRunner:
    """Turns plans into logits. Rank 0's runner also passes each plan on to the other ranks."""

    def __init__(
        self, model: CausalModel, ragged: RaggedBatchWrapper, links: PlanSender | None = None
    ) -> None:
        self.model = model
        self._ragged = ragged
        self._links = links

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Return logits [sampling sequences, vocabulary], in the plan's order."""
        if self._links is not None:
            self._links.send(plan.to_bytes())
        return self.model.forward(self._ragged.build(plan))

    def close(self) -> None:
        """Let the other ranks end."""
        if self._links is not None:
            self._links.close()
