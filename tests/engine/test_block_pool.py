"""The block pool keeps every block in exactly one state, whatever is done with it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mii.engine.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[int] = []  # one entry for each reference
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            blocks = self.pool.allocate(count)
            assert not set(blocks) & set(self.held)
            for block in blocks:
                self.content.pop(block, None)
            self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 20))
    def name(self, data: st.DataObject, key: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        name = bytes([key])
        if block not in self.content and name not in self.content.values():
            self.content[block] = name
        self.pool.name(block, name)

    @rule(key=st.integers(0, 20))
    def find(self, key: int) -> None:
        block = self.pool.find(bytes([key]))
        if block is not None:
            assert self.content[block] == bytes([key])
            self.pool.hold(block)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])

    @invariant()
    def whole(self) -> None:
        self.pool.check()
        assert self.pool.num_available == 12 - len(set(self.held))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_released_content_is_given_up_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.name(block, bytes([block]))
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    pool.allocate(1)
    assert [pool.find(bytes([block])) for block in blocks] == [blocks[0], None, blocks[2]]
