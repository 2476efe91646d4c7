"""The block pool and the prefix cache's keeping, in any order, against an oracle that only counts: no leak, no double free, no block
that one writes and another holds, and never a block of one region in the other."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.engine.block_pool import BlockPool, BlockState, PoolCorrupt, PoolGeometry, Region


class PoolMachine(RuleBasedStateMachine):
    """Holders take, seal, share, give back; the cache keeps and evicts; now and then somebody tries what is not permitted."""

    @initialize(prefill_blocks=st.integers(1, 6), decode_blocks=st.integers(1, 6))
    def build(self, prefill_blocks: int, decode_blocks: int) -> None:
        self.pool = BlockPool(PoolGeometry(4, prefill_blocks, decode_blocks))
        self.held: list[list[int]] = []
        self.sealed: set[int] = set()
        self.kept: set[int] = set()
        self.owner = 0

    def holders(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.held)

    @rule(region=st.sampled_from(Region), count=st.integers(0, 7))
    def allocate(self, region: Region, count: int) -> None:
        first, end = self.pool.geometry.bounds(region)
        free = [block for block in range(first, end) if not self.holders(block) and block not in self.kept]
        self.owner += 1
        blocks = self.pool.allocate(region, count, self.owner)
        assert blocks == (free[:count] if count <= len(free) else None)
        if blocks:
            assert all(int(self.pool.owners[block]) == self.owner for block in blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        open_ones = [block for block in blocks if block not in self.sealed]
        if any(self.pool.region(block) is Region.DECODE for block in open_ones):
            with pytest.raises(PoolCorrupt):
                self.pool.seal(open_ones)
            return
        self.pool.seal(open_ones)
        self.sealed.update(open_ones)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.geometry.end_block - 1))
        if block not in self.sealed:
            with pytest.raises(PoolCorrupt):
                self.pool.retain([block])
            return
        self.pool.retain([block])
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({block for blocks in self.held for block in blocks})))
        if block not in self.sealed or block in self.kept:
            with pytest.raises(PoolCorrupt):
                self.pool.keep(block)
            return
        self.pool.keep(block)
        self.kept.add(block)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.geometry.end_block - 1))
        goes = block in self.kept and not self.holders(block)
        assert self.pool.evict(block) == goes
        if goes:
            self.kept.remove(block)
            self.sealed.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        self.sealed -= {block for block in blocks if not self.holders(block) and block not in self.kept}

    @rule(data=st.data())
    def release_what_nobody_holds(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(-2, self.pool.geometry.end_block + 2))
        if self.holders(block) == 0:
            with pytest.raises(PoolCorrupt):
                self.pool.release([block])

    @rule(data=st.data(), words=st.lists(st.integers(0, 2**31 - 1), max_size=3))
    def damage_and_reconcile(self, data: st.DataObject, words: list[int]) -> None:
        """Any words at all in blocks that nobody holds: made right again, without touching those of others."""
        free = [b for b in range(self.pool.geometry.end_block) if not self.holders(b) and b not in self.kept]
        for block, word in zip(free, words, strict=False):
            self.pool.words[block] = word
        self.pool.reconcile(self.held, self.kept)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.held, self.kept)
        states = {block: self.pool.state(block) for block in range(self.pool.geometry.end_block)}
        for block, state in states.items():
            assert (state is BlockState.OPEN) == (self.holders(block) == 1 and block not in self.sealed)
            assert (state is BlockState.FREE) == (not self.holders(block) and block not in self.kept)
            if self.pool.region(block) is Region.DECODE:
                assert state in (BlockState.FREE, BlockState.OPEN)
                assert self.holders(block) <= 1
        assert self.pool.used_blocks == sum(self.holders(block) > 0 for block in states)
        assert self.pool.kept_blocks == sum(not self.holders(block) for block in self.kept)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
