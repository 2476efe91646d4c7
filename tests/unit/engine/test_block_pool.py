"""The block pool: two regions, three states, books that balance."""

from __future__ import annotations

import pytest

from appliance.core.errors import BudgetError
from appliance.engine.block_pool import BlockPool, BlockState, PoolCorrupt, PoolGeometry, Region

GEOMETRY = PoolGeometry(block_tokens=4, prefill_blocks=3, decode_blocks=2)


def test_the_pool_is_divided_by_the_fraction_and_keeps_a_null_block() -> None:
    """11 blocks of 4 tokens of 8 bytes: one is null, 60 % of ten hold prompts."""
    geometry = PoolGeometry.divide(11 * 32, 8, 4, 0.6)
    assert (geometry.prefill_blocks, geometry.decode_blocks, geometry.null_block) == (6, 4, 10)
    assert geometry.bounds(Region.PREFILL) == (0, 6)
    assert geometry.bounds(Region.DECODE) == (6, 10)
    assert (geometry.prefill_tokens, geometry.decode_tokens) == (24, 16)


@pytest.mark.parametrize(("pool_bytes", "fraction"), [(64, 0.6), (0, 0.5), (32 * 11, 0.01), (32 * 11, 0.99)])
def test_a_pool_that_leaves_a_region_empty_is_refused(pool_bytes: int, fraction: float) -> None:
    """With the size, the blocks it holds, and what would do."""
    with pytest.raises(BudgetError, match=r"holds \d+ blocks of 4 tokens \(32 B each\).*raise \[engine\] kv_pool_bytes to at least 256 B"):
        PoolGeometry.divide(pool_bytes, 8, 4, fraction)


def test_allocation_is_all_or_nothing() -> None:
    """None means not now, and nothing was taken."""
    pool = BlockPool(GEOMETRY)
    assert pool.allocate(Region.PREFILL, 4) is None
    assert pool.free_blocks(Region.PREFILL) == 3
    assert sorted(pool.allocate(Region.PREFILL, 3) or []) == [0, 1, 2]
    assert pool.allocate(Region.PREFILL, 1) is None
    assert sorted(pool.allocate(Region.DECODE, 2) or []) == [3, 4]
    assert pool.used_blocks == 5


def test_blocks_are_open_then_sealed_then_free() -> None:
    """And no other way round."""
    pool = BlockPool(GEOMETRY)
    (block,) = pool.allocate(Region.PREFILL, 1) or []
    assert pool.state(block) is BlockState.OPEN
    pool.seal([block])
    assert pool.state(block) is BlockState.SEALED
    with pytest.raises(PoolCorrupt, match=f"block {block} is sealed, expected open"):
        pool.seal([block])
    pool.free([block])
    with pytest.raises(PoolCorrupt, match=f"block {block} was freed twice"):
        pool.free([block])


def test_a_decode_block_is_never_sealed() -> None:
    """It is private to a sequence that goes on writing it."""
    pool = BlockPool(GEOMETRY)
    with pytest.raises(PoolCorrupt, match="decode region"):
        pool.seal(pool.allocate(Region.DECODE, 1) or [])


def test_integrity_counts_in_each_region() -> None:
    """A leaked block, a shared block and a block held after its release are found, with the numbers."""
    pool = BlockPool(GEOMETRY)
    a = pool.allocate(Region.PREFILL, 2) or []
    b = pool.allocate(Region.DECODE, 1) or []
    pool.check_integrity([a, b])
    with pytest.raises(PoolCorrupt, match=r"prefill region do not add up: 1 free \(1 different\) \+ 1 held != 3, 2 marked"):
        pool.check_integrity([a[:1], b])
    with pytest.raises(PoolCorrupt, match="1 of 4 held KV blocks are held twice"):
        pool.check_integrity([a, b, a[:1]])
    pool.free(b)
    with pytest.raises(PoolCorrupt, match=r"decode region do not add up: 2 free \(2 different\) \+ 1 held != 2, 0 marked"):
        pool.check_integrity([a, b])
