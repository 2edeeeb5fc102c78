"""The blocks of the KV cache: who holds them, and which can be found again by their content."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids, counts references, and remembers the content of full blocks.

    A block is in exactly one of three states:

        free      reference count 0, no key: its content means nothing
        held      reference count > 0: in the block tables of so many sequences
        cached    reference count 0, with a key: can be found by content, and is given away, least
                  recently released first, when no free block is left

    A key identifies the tokens of a block and all tokens before it. Tensors live elsewhere.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks of no particular content, each with one reference.

        The caller checks `num_available` first.
        """
        assert count <= self.num_available, f"{count} blocks of {self.num_available}"
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def find(self, key: bytes) -> int | None:
        """Return the block with this content, held or cached, or None."""
        return self._block_of.get(key)

    def is_cached(self, block: int) -> bool:
        """Whether holding this block would make one block fewer available."""
        return block in self._cached

    def hold(self, block: int) -> None:
        """Add a reference to a block that `find` returned."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def name(self, block: int, key: bytes) -> None:
        """Let a held block be found by its content. The first block of a content keeps its key."""
        assert self._references[block] > 0
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. Pass a sequence's last block first: it is reused first."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released too often"
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def check(self) -> None:
        """Assert that every block is in exactly one state. For tests."""
        held = [b for b in range(self.num_blocks) if self._references[b] > 0]
        states = [*self._free, *self._cached, *held]
        assert sorted(states) == list(range(self.num_blocks))
        assert all(self._key_of[block] is None for block in self._free)
        assert all(self._key_of[block] == key for key, block in self._block_of.items())
        named = sum(key is not None for key in self._key_of)
        assert named == len(self._block_of)

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block
