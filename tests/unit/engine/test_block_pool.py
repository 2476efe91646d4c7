"""The block pool: two regions, three states, books that balance."""

from __future__ import annotations

import pytest

from appliance.core.errors import BudgetError
from appliance.engine.block_pool import BlockPool, BlockState, PoolCorrupt, PoolGeometry, Region
from appliance_kernels.refcount.reference import KEPT, SEALED

GEOMETRY = PoolGeometry(block_tokens=4, prefill_blocks=3, decode_blocks=2)


def test_the_pool_is_divided_by_the_fraction_and_keeps_a_null_block() -> None:
    """11 blocks of 4 tokens of 8 bytes: one is null, 60 % of ten hold prompts."""
    geometry = PoolGeometry.divide(11 * 32, 8, 4, 0.6)
    assert (geometry.prefill_blocks, geometry.decode_blocks, geometry.null_block, geometry.end_block) == (6, 4, 6, 11)
    assert geometry.bounds(Region.PREFILL) == (0, 6)
    assert geometry.bounds(Region.DECODE) == (7, 11)
    assert (geometry.prefill_tokens, geometry.decode_tokens) == (24, 16)


@pytest.mark.parametrize(("pool_bytes", "fraction"), [(64, 0.6), (0, 0.5), (32 * 11, 0.01), (32 * 11, 0.99)])
def test_a_pool_that_leaves_a_region_empty_is_refused(pool_bytes: int, fraction: float) -> None:
    """With the size, the blocks it holds, and what would do."""
    with pytest.raises(BudgetError, match=r"holds \d+ blocks of 4 tokens \(32 B each\).*raise \[engine\] kv_pool_bytes to at least 256 B"):
        PoolGeometry.divide(pool_bytes, 8, 4, fraction)


def test_allocation_is_all_or_nothing() -> None:
    """None means not now, and nothing was taken."""
    pool = BlockPool(GEOMETRY)
    assert pool.allocate(Region.PREFILL, 4, 1) is None
    assert pool.free_blocks(Region.PREFILL) == 3
    assert pool.allocate(Region.PREFILL, 3, 1) == [0, 1, 2]
    assert pool.allocate(Region.PREFILL, 1, 1) is None
    assert pool.allocate(Region.DECODE, 2, 1) == [4, 5]
    assert pool.allocate(Region.DECODE, 0, 1) == []
    assert pool.used_blocks == 5
    assert pool.owners.tolist() == [1, 1, 1, 0, 1, 1]


def test_blocks_are_open_then_sealed_then_free() -> None:
    """And no other way round."""
    pool = BlockPool(GEOMETRY)
    (block,) = pool.allocate(Region.PREFILL, 1, 1) or []
    assert pool.state(block) is BlockState.OPEN
    pool.seal([block])
    assert pool.state(block) is BlockState.SEALED
    with pytest.raises(PoolCorrupt, match=f"block {block} with word 0x40000001 refuses the step seal"):
        pool.seal([block])
    pool.release([block])
    assert pool.state(block) is BlockState.FREE
    with pytest.raises(PoolCorrupt, match=f"block {block} with word 0x0 refuses the step release"):
        pool.release([block])
    with pytest.raises(PoolCorrupt, match="block 6 refuses the step release"):
        pool.release([6])


def test_only_sealed_blocks_are_shared_and_the_last_holder_frees_them() -> None:
    """One that is written cannot be retained; a free one cannot either."""
    pool = BlockPool(GEOMETRY)
    (block,) = pool.allocate(Region.PREFILL, 1, 1) or []
    with pytest.raises(PoolCorrupt, match="refuses the step retain"):
        pool.retain([block])
    pool.seal([block])
    pool.retain([block, block])
    pool.release([block])
    pool.release([block])
    assert (pool.state(block), pool.used_blocks) == (BlockState.SEALED, 1)
    pool.release([block])
    assert (pool.state(block), pool.used_blocks) == (BlockState.FREE, 0)
    with pytest.raises(PoolCorrupt, match="refuses the step retain"):
        pool.retain([block])


def test_what_the_prefix_cache_keeps_outlives_its_holders_and_goes_only_when_nobody_holds_it() -> None:
    """It is not free, not used, and comes back to life when it is retained."""
    pool = BlockPool(GEOMETRY)
    (block,) = pool.allocate(Region.PREFILL, 1, 1) or []
    pool.seal([block])
    pool.keep(block)
    assert not pool.evict(block)
    pool.release([block])
    assert (pool.state(block), pool.used_blocks, pool.kept_blocks, pool.free_blocks(Region.PREFILL)) == (BlockState.KEPT, 0, 1, 2)
    pool.retain([block])
    assert not pool.evict(block)
    pool.release([block])
    assert pool.evict(block)
    assert pool.state(block) is BlockState.FREE


def test_a_decode_block_is_never_sealed() -> None:
    """It is private to a sequence that goes on writing it."""
    pool = BlockPool(GEOMETRY)
    with pytest.raises(PoolCorrupt, match="decode region"):
        pool.seal(pool.allocate(Region.DECODE, 1, 1) or [])


def test_integrity_counts_in_each_region() -> None:
    """A leaked block, a shared block and a block held after its release are found, with the numbers."""
    pool = BlockPool(GEOMETRY)
    a = pool.allocate(Region.PREFILL, 2, 1) or []
    b = pool.allocate(Region.DECODE, 1, 1) or []
    pool.check_integrity([a, b], [])
    with pytest.raises(
        PoolCorrupt, match=r"prefill region do not add up: 1 free \+ 1 held \+ 0 kept != 3, 2 marked as held; first at block 1"
    ):
        pool.check_integrity([a[:1], b], [])
    with pytest.raises(PoolCorrupt, match="first at block 0: word 0x1, 2 holders"):
        pool.check_integrity([a, b, a[:1]], [])
    with pytest.raises(PoolCorrupt, match=r"1 free \+ 2 held \+ 1 kept"):
        pool.check_integrity([a, b], [2])
    with pytest.raises(PoolCorrupt, match="first at block 0: word 0x1, 0 holders"):
        pool.check_integrity([[2**40, a[1]], b, [-1]], [])
    pool.release(b)
    with pytest.raises(PoolCorrupt, match=r"decode region do not add up: 2 free \+ 1 held \+ 0 kept != 2, 0 marked"):
        pool.check_integrity([a, b], [])


@pytest.mark.parametrize(
    ("region", "word", "holders", "kept"),
    [
        (Region.DECODE, SEALED | 1, 1, False),
        (Region.PREFILL, 2, 2, False),
        (Region.PREFILL, KEPT | 1, 1, True),
        (Region.PREFILL, SEALED, 0, False),
    ],
)
def test_a_word_that_no_step_leads_to_is_found_though_its_count_is_right(region: Region, word: int, holders: int, kept: bool) -> None:
    """Sealed among answers, written by two, kept while it is written, sealed and nobody's."""
    pool = BlockPool(GEOMETRY)
    (block,) = pool.allocate(region, 1, 1) or []
    pool.words[block] = word
    with pytest.raises(PoolCorrupt, match=f"first at block {block}: word {word:#x}, {holders} holders"):
        pool.check_integrity([[block]] * holders, [block] if kept else [])


def test_after_a_violation_the_words_are_made_to_fit_those_who_are_left() -> None:
    """Whatever the words had become: what others hold and keep stays as it was, everything else is free."""
    pool = BlockPool(GEOMETRY)
    mine = pool.allocate(Region.PREFILL, 3, 1) or []
    (answer,) = pool.allocate(Region.DECODE, 1, 1) or []
    (lost,) = pool.allocate(Region.DECODE, 1, 2) or []
    pool.seal(mine)
    pool.keep(mine[1])
    pool.release(mine[1:])
    before = pool.words.clone()
    pool.words[lost] = 0x1234
    pool.words[mine[2]] = 1
    pool.words[mine[1]] = 1
    pool.words[answer] = 0
    assert pool.reconcile([[mine[0]], [answer]], [mine[1]]) == 4
    before[lost] = 0
    assert pool.words.tolist() == before.tolist()
    pool.check_integrity([[mine[0]], [answer]], [mine[1]])
