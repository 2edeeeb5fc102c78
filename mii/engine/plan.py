"""What crosses between the scheduler and the runner, and from rank 0 to the other ranks.

A request has a number of computed tokens that catches up with its number of tokens; a step moves
some requests forward. There is no prefill step and no decode step:

      prompt                      generated
    |-----------------------------|----------->
    |<-- computed -->|<-- step -->|            a chunk of a long prompt: no logits wanted
    |<-- computed ------------------>|<-step->| the newest token: its logits give the next one
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

_HEADER = struct.Struct("<qii")  # step, number of sequences, number of decodes
_SEQUENCE = struct.Struct("<qiiiiiiB")
_SAMPLES, _FROM_DEVICE, _FIRST = 1, 2, 4


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One sequence's share of a step: tokens [start, start + num_tokens) of it are computed."""

    uid: int  # the sequence's id, never used again in this engine's life
    slot: int  # row of the runner's persistent state (block table, last token)
    start: int  # tokens of the sequence whose keys and values exist already
    num_tokens: int  # tokens computed in this step
    token_ids: tuple[int, ...]  # the ids of those tokens; empty if from_device
    new_blocks: tuple[int, ...]  # appended to the slot's block table before the step
    rope_length: int  # prompt length: what length-dependent rotary embeddings of the prompt use
    samples: bool  # the step's last logits of this sequence give its next token
    from_device: bool = False  # the one token is the slot's last sampled id, not yet known here
    first: bool = False  # the slot's block table starts anew


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Sequences with one token come first: kernels may treat them apart."""

    step: int  # counts from 0 over the engine's life
    sequences: tuple[PlannedSequence, ...]
    num_decodes: int  # the first so many sequences have exactly one token

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole ragged batch."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    def to_bytes(self) -> bytes:
        """Encode for another rank: fixed little-endian records, no pickle."""
        parts = [_HEADER.pack(self.step, len(self.sequences), self.num_decodes)]
        for s in self.sequences:
            flags = s.samples * _SAMPLES | s.from_device * _FROM_DEVICE | s.first * _FIRST
            counts = (len(s.token_ids), len(s.new_blocks), s.rope_length)
            parts.append(_SEQUENCE.pack(s.uid, s.slot, s.start, s.num_tokens, *counts, flags))
            if s.token_ids:
                parts.append(np.asarray(s.token_ids, dtype="<i4").tobytes())
            if s.new_blocks:
                parts.append(np.asarray(s.new_blocks, dtype="<i4").tobytes())
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> StepPlan:
        """Decode what `to_bytes` gave."""
        step, num_sequences, num_decodes = _HEADER.unpack_from(data, 0)
        offset = _HEADER.size
        sequences = []
        for _ in range(num_sequences):
            uid, slot, start, num_tokens, num_ids, num_blocks, rope_length, flags = (
                _SEQUENCE.unpack_from(data, offset)
            )
            offset += _SEQUENCE.size
            ids = np.frombuffer(data, "<i4", num_ids, offset)
            offset += 4 * num_ids
            blocks = np.frombuffer(data, "<i4", num_blocks, offset)
            offset += 4 * num_blocks
            sequences.append(
                PlannedSequence(
                    uid=uid,
                    slot=slot,
                    start=start,
                    num_tokens=num_tokens,
                    token_ids=tuple(ids.tolist()),
                    new_blocks=tuple(blocks.tolist()),
                    rope_length=rope_length,
                    samples=bool(flags & _SAMPLES),
                    from_device=bool(flags & _FROM_DEVICE),
                    first=bool(flags & _FIRST),
                )
            )
        return StepPlan(step, tuple(sequences), num_decodes)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token under the model's own distribution, in fp32."""

    sampled: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), most probable first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: one new token for each sequence of its plan that samples."""

    step: int
    uids: tuple[int, ...]  # the sampling sequences, in the plan's order
    token_ids: tuple[int, ...]  # their new tokens
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by uid, where asked for
