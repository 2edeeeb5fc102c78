"""Which sequences the engine knows, what is computed of them, and the blocks that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

import numpy as np

from mii.engine.block_pool import BlockPool
from mii.errors import MIIError


class SchedulingResult(Enum):
    """Whether tokens can be computed now; names and values are DeepSpeed-FastGen's."""

    Success = 0
    EngineSequenceLimitExceeded = 1  # more sequences than the engine tracks
    BatchSequenceLimitExceeded = 2  # more sequences than one step takes
    BatchTokenLimitExceeded = 3  # more tokens than one step takes
    KVCacheLimitExceeded = 4  # not enough free blocks
    SequenceTokenLimitExceeded = 5  # a sequence longer than the context


class SchedulingError(MIIError, RuntimeError):
    """`put` was asked for what `can_schedule` refuses. `result` says why."""

    code = "scheduling_error"

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"the tokens cannot be scheduled now: {result.name}")
        self.result = result


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence. `token_ids` runs ahead of `num_computed`, which a step moves on.

    token_ids   |<---- prompt ---->|<---- generated ---->|
    computed    |<--- keys and values exist --->|
    blocks      |   0   |   1   |   2   |   3   |   4   |
    """

    uid: int
    slot: int  # row of the runner's persistent state
    token_ids: list[int] = field(default_factory=list)  # known ids
    prompt_length: int = 0
    owner: str = ""  # shares cached blocks with none but its own; "": with all that have no owner
    num_computed: int = 0  # tokens whose keys and values exist, or will once launched steps end
    num_in_flight: int = 0  # tokens that launched steps will sample: counted, not yet known
    num_cached: int = 0  # tokens of the prompt that the prefix cache saved
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the leading full blocks
    num_announced: int = 0  # leading blocks that the runner's block table has

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are still to be computed; 1 for a sequence that decodes."""
        return self.num_tokens - self.num_computed


class DSStateManager:
    """Tracks sequences and gives them blocks.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens per block.
        max_tracked_sequences: sequences that may hold blocks at one time.
        max_length: tokens of one sequence at most.
        prefix_caching: share full blocks of equal content.
        static_length: tokens up to which a key depends only on the tokens before it; blocks beyond
            are never shared (see DecoderSpec.static_length). None: no such bound.
    """

    n_kv_cache_groups = 1

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_tracked_sequences: int,
        max_length: int,
        prefix_caching: bool = True,
        static_length: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_tracked_sequences = max_tracked_sequences
        self.max_length = max_length
        self.pool = BlockPool(num_blocks)
        self._prefix_caching = prefix_caching
        self._static_length = static_length
        self._sequences: dict[int, SequenceState] = {}
        self._free_slots = list(range(max_tracked_sequences - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had at once: unused ones, and those only the prefix cache holds."""
        return self.pool.num_available

    @property
    def n_tracked_sequences(self) -> int:
        """Sequences that hold a slot."""
        return len(self._sequences)

    def get_sequence(self, uid: int) -> SequenceState | None:
        """Return a tracked sequence, or None."""
        return self._sequences.get(uid)

    def get_or_create_sequence(self, uid: int) -> SequenceState:
        """Return the sequence of this uid; a new one is empty.

        Raises:
            SchedulingError: if as many sequences are tracked as may be.
        """
        sequence = self._sequences.get(uid)
        if sequence is None:
            if not self._free_slots:
                raise SchedulingError(SchedulingResult.EngineSequenceLimitExceeded)
            sequence = SequenceState(uid=uid, slot=self._free_slots.pop())
            self._sequences[uid] = sequence
        return sequence

    def flush_sequence(self, uid: int) -> None:
        """Forget a sequence: its blocks and its slot are free again. Unknown uids are ignored."""
        sequence = self._sequences.pop(uid, None)
        if sequence is not None:
            self.release_blocks(sequence)
            self._free_slots.append(sequence.slot)

    def blocks_wanted(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many more blocks the sequence needs to compute `num_tokens` further tokens."""
        total = -(-(sequence.num_computed + num_tokens) // self.block_size)
        return max(0, total - len(sequence.blocks))

    def extend(self, sequence: SequenceState, num_tokens: int) -> SchedulingResult:
        """Give the sequence the blocks for `num_tokens` further tokens, or change nothing."""
        if sequence.num_computed + num_tokens > self.max_length:
            return SchedulingResult.SequenceTokenLimitExceeded
        count = self.blocks_wanted(sequence, num_tokens)
        if count > self.pool.num_available:
            return SchedulingResult.KVCacheLimitExceeded
        if count:
            sequence.blocks.extend(self.pool.allocate(count))
        return SchedulingResult.Success

    def can_schedule(self, uids: Sequence[int], lengths: Sequence[int]) -> SchedulingResult:
        """Say whether `extend` would succeed for all of these together."""
        new_sequences = blocks = 0
        for uid, length in zip(uids, lengths, strict=True):
            sequence = self._sequences.get(uid)
            computed, held = 0, 0
            if sequence is None:
                new_sequences += 1
            else:
                computed, held = sequence.num_computed, len(sequence.blocks)
            if computed + length > self.max_length:
                return SchedulingResult.SequenceTokenLimitExceeded
            blocks += max(0, -(-(computed + length) // self.block_size) - held)
        if new_sequences > len(self._free_slots):
            return SchedulingResult.EngineSequenceLimitExceeded
        if blocks > self.pool.num_available:
            return SchedulingResult.KVCacheLimitExceeded
        return SchedulingResult.Success

    def match_prefix(self, sequence: SequenceState) -> tuple[list[int], list[bytes]]:
        """Return the cached blocks that begin this sequence, and their keys; nothing is held yet.

        At least the last token stays to be computed: its logits are wanted.
        """
        assert not sequence.blocks
        blocks: list[int] = []
        keys: list[bytes] = []
        for key in self._full_block_keys(sequence, len(sequence.token_ids) - 1):
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
            keys.append(key)
        return blocks, keys

    def adopt_prefix(self, sequence: SequenceState, blocks: list[int], keys: list[bytes]) -> None:
        """Begin the sequence's block table with the blocks that `match_prefix` found."""
        for block in blocks:
            self.pool.hold(block)
        sequence.blocks.extend(blocks)
        sequence.block_keys.extend(keys)
        sequence.num_computed = sequence.num_cached = len(blocks) * self.block_size

    def name_full_blocks(self, sequence: SequenceState) -> None:
        """Let later sequences find the blocks that are full, computed, and of known content."""
        known = min(sequence.num_computed, len(sequence.token_ids))
        if known // self.block_size <= len(sequence.block_keys):
            return
        for key in self._full_block_keys(sequence, known, sequence.block_keys):
            self.pool.name(sequence.blocks[len(sequence.block_keys)], key)
            sequence.block_keys.append(key)

    def release_blocks(self, sequence: SequenceState) -> None:
        """Take the sequence's blocks; it would have to be computed anew."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks.clear()
        sequence.block_keys.clear()
        sequence.num_computed = 0
        sequence.num_announced = 0

    def _full_block_keys(
        self, sequence: SequenceState, end: int, known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the keys of the full blocks within [0, end) that follow the known ones.

        A block's key is a hash over the key of the block before it and its own ids, so it stands
        for all tokens up to the block's end. The first one's hash is over the owner, too: how soon
        an answer comes tells nobody what others have asked.
        """
        if not self._prefix_caching:
            return []
        if self._static_length is not None:
            # The prompt's length takes part in the keys beyond: then nothing may be shared at all.
            if sequence.prompt_length > self._static_length:
                return []
            end = min(end, self._static_length)
        first, size = len(known), self.block_size
        ids = np.asarray(sequence.token_ids[first * size : end // size * size], dtype="<i4")
        previous = known[-1] if known else sequence.owner.encode()
        keys = []
        for block in ids.reshape(-1, size):
            previous = blake2b(previous + block.tobytes(), digest_size=16).digest()
            keys.append(previous)
        return keys
