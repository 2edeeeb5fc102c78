"""A step as tensors: what the runner hands to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedBatch:
    """All tokens of a step laid end to end. T tokens of S sequences; L rows of logits are wanted.

            |<- sequence 0 ->|<------ sequence 1 ------>|<- 2 ->|
      query  starts[0]        starts[1]                  starts[2]  starts[3] = T

    For each sequence:
                        |<----------- context_lengths ----------->|
                        |<--- computed before --->|<-- its query -->|

    Sequences with a query of one token ("decodes") come first.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], of each token in its sequence
    rope_lengths: torch.Tensor  # int64 [T], sequence length that length-dependent rotaries assume
    kv_slots: torch.Tensor  # int64 [T], block * block_size + offset where k and v are written
    query_starts: torch.Tensor  # int32 [S + 1]
    context_lengths: torch.Tensor  # int32 [S]
    block_tables: torch.Tensor  # int32 [S, blocks of the longest]; beyond a sequence's own: 0
    logits_rows: torch.Tensor | None  # int64 [L], tokens whose logits are wanted; None: all

    # The same facts for the host, for backends that lay out a step there.
    num_decodes: int
    query_lengths: tuple[int, ...]  # [S]
    host_context_lengths: tuple[int, ...]  # [S]

    # What GPU kernels read in place of the host's facts, so that a step can be a CUDA graph.
    decode_lengths: torch.Tensor | None = None  # int32 [D], context of token i; 0: no decode
    query_tiles: tuple[torch.Tensor, torch.Tensor] | None = None  # see kernels.attention_prefill

    @property
    def num_sequences(self) -> int:
        """S"""
        return len(self.query_lengths)
