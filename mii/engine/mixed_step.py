"""The inputs of a step with prompts in it, laid out so that the step can be one CUDA graph.

A graph has fixed sizes: T tokens, S sequences, N tiles of query tokens. One array of integers holds
all that the host says of a step; what is not used says so (slot `padding`, length 0, sequence -1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mii.engine.plan import StepPlan
from mii.kernels.attention_prefill import query_tiles

MAX_CHUNKS = 64  # sequences with more than one token in one step


@dataclass(frozen=True)
class MixedSize:
    """The sizes of one graph."""

    tokens: int
    sequences: int
    tile_rows: int  # query tokens of a tile

    @property
    def tiles(self) -> int:
        """Tiles that any step of this size has at most."""
        return self.tokens // self.tile_rows + min(MAX_CHUNKS, self.sequences)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the step has no more of anything."""
        chunks = len(plan.sequences) - plan.num_decodes
        return (
            plan.num_tokens <= self.tokens
            and len(plan.sequences) <= self.sequences
            and chunks <= MAX_CHUNKS
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """How long each field of the array is."""
        t, s, n = self.tokens, self.sequences, self.tiles
        return (t, t, t, t, s, s, s, s + 1, s, s, n, n)

    @property
    def total(self) -> int:
        """Length of the array."""
        return sum(self.lengths)


def mixed_sizes(max_tokens: int, max_sequences: int, tile_rows: int) -> list[MixedSize]:
    """Return the sizes that graphs are captured for, ascending; no more sequences than tokens."""
    tokens = [t for t in (256, 512, 1024) if t < max_tokens] + [max_tokens]
    sequences = [s for s in (64, 160, 320) if s < max_sequences] + [max_sequences]
    pairs = sorted({(t, min(s, t)) for t in tokens for s in sequences})
    return [MixedSize(t, s, tile_rows) for t, s in pairs]


@dataclass(frozen=True)
class MixedInputs:
    """The fields of the array, as views of it on the device. int64 unless said otherwise."""

    token_ids: torch.Tensor  # [T], -1: the slot's last token, which the host does not know yet
    positions: torch.Tensor  # [T]
    rope_lengths: torch.Tensor  # [T]
    token_slots: torch.Tensor  # [T]
    slots: torch.Tensor  # [S]
    context_lengths: torch.Tensor  # [S]
    decode_lengths: torch.Tensor  # [S], context of the first sequences, which decode; then 0
    query_starts: torch.Tensor  # [S + 1]
    logits_rows: torch.Tensor  # [S]
    logits_slots: torch.Tensor  # [S]
    tile_sequences: torch.Tensor  # [N]
    tile_starts: torch.Tensor  # [N]

    @staticmethod
    def views(array: torch.Tensor, size: MixedSize) -> MixedInputs:
        """Return the fields of an array [size.total] or more."""
        return MixedInputs(*array[: size.total].split(size.lengths))


def lay_out(
    plan: StepPlan, size: MixedSize, padding: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the array that describes a step.

    Args:
        plan: the step; `size.fits(plan)`.
        size: the graph's sizes.
        padding: the slot for what is not used.
    """
    sequences = plan.sequences
    facts = np.array(
        [(s.slot, s.start, s.num_tokens, s.rope_length, s.samples) for s in sequences], np.int64
    )
    slots, starts, counts, prompts, samples = facts.T
    contexts = starts + counts
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    of_token = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[of_token]
    known = [i for s in sequences for i in (s.token_ids or (-1,))]
    decode_lengths = contexts[: plan.num_decodes]
    is_sampled = samples.astype(bool)
    tiles = query_tiles(counts.tolist(), size.tile_rows, first=plan.num_decodes)
    fields = (
        (np.array(known, np.int64), 0),
        (positions, 0),
        (np.maximum(prompts[of_token], positions + 1), 1),
        (slots[of_token], padding),
        (slots, padding),
        (contexts, 0),
        (decode_lengths, 0),
        (query_starts, query_starts[-1]),
        ((query_starts[1:] - 1)[is_sampled], 0),
        (slots[is_sampled], padding),
        (np.array(tiles[0], np.int64), -1),
        (np.array(tiles[1], np.int64), 0),
    )
    array = np.empty(size.total, dtype=np.int64)
    offset = 0
    for (values, filler), length in zip(fields, size.lengths, strict=True):
        array[offset : offset + len(values)] = values
        array[offset + len(values) : offset + length] = filler
        offset += length
    return array
