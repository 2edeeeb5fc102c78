"""Turns a step's plan into tensors."""

from __future__ import annotations

import numpy as np
import torch

from mii.attention.batch import RaggedBatch
from mii.engine.plan import PlannedSequence, StepPlan


class RaggedBatchWrapper:
    """Keeps every slot's block table and lays the tokens of a step end to end.

    Args:
        max_slots: sequences that may hold blocks at one time.
        max_length: tokens of one sequence at most.
        block_size: tokens per block.
        device: where the batch's tensors go.
    """

    def __init__(
        self, max_slots: int, max_length: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._device = device
        blocks_per_sequence = -(-max_length // block_size)
        self._block_tables = np.zeros((max_slots, blocks_per_sequence), dtype=np.int32)
        self._num_blocks = np.zeros(max_slots, dtype=np.int32)

    def build(self, plan: StepPlan) -> RaggedBatch:
        """Take in the plan's new blocks and return the step's tensors."""
        for planned in plan.sequences:
            self._append_blocks(planned)
        sequences = plan.sequences
        counts = np.fromiter((s.num_tokens for s in sequences), np.int64, len(sequences))
        starts = np.fromiter((s.start for s in sequences), np.int64, len(sequences))
        prompts = np.fromiter((s.rope_length for s in sequences), np.int64, len(sequences))
        slots = np.fromiter((s.slot for s in sequences), np.int64, len(sequences))
        query_starts = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_starts[1:])

        of_token = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[of_token]
        tables = self._block_tables[slots]
        blocks = tables[of_token, positions // self.block_size].astype(np.int64)
        token_ids = np.fromiter((t for s in sequences for t in s.token_ids), np.int64)
        contexts = starts + counts
        longest = -(-int(contexts.max()) // self.block_size)
        samples = np.fromiter((s.samples for s in sequences), np.bool_, len(sequences))
        return RaggedBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            rope_lengths=self._tensor(np.maximum(prompts[of_token], positions + 1)),
            kv_slots=self._tensor(blocks * self.block_size + positions % self.block_size),
            query_starts=self._tensor(query_starts.astype(np.int32)),
            context_lengths=self._tensor(contexts.astype(np.int32)),
            block_tables=self._tensor(tables[:, :longest]),
            logits_rows=self._tensor((query_starts[1:] - 1)[samples]),
            num_decodes=plan.num_decodes,
            query_lengths=tuple(counts.tolist()),
            host_context_lengths=tuple(contexts.tolist()),
        )

    def _append_blocks(self, planned: PlannedSequence) -> None:
        have = 0 if planned.first else int(self._num_blocks[planned.slot])
        end = have + len(planned.new_blocks)
        self._block_tables[planned.slot, have:end] = planned.new_blocks
        self._num_blocks[planned.slot] = end

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
