"""What is done with whole blocks between passes is checked like a kernel's write: it reaches its owner's open blocks, or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.engine.block_keeping import BlockKeeping
from appliance.engine.block_pool import BlockPool, PoolGeometry, Region
from appliance.engine.kv_cache import KvCache
from appliance.engine.models.config import DecoderConfig, LayerSpec, RopeSpec
from appliance.engine.scheduler import BlockMoves
from appliance.engine.swap import SwapSpace
from appliance_kernels.kv_write.reference import Reason, Violations

ME, OTHER = 11, 12
GEOMETRY = PoolGeometry(4, 4, 6)
CONFIG = DecoderConfig("LlamaForCausalLM", 32, 64, 96, 2, 1, 16, (LayerSpec(0, RopeSpec(1e4)),) * 2, 1e-5, "silu", 0.25, True, 4096)


class Kept:
    """A pool with blocks of two owners, and a cache in which each block holds its own number + 1."""

    def __init__(self) -> None:
        self.pool = BlockPool(GEOMETRY)
        self.prompt = self.pool.allocate(Region.PREFILL, 2, ME) or []
        self.mine = self.pool.allocate(Region.DECODE, 2, ME) or []
        self.others = self.pool.allocate(Region.DECODE, 2, OTHER) or []
        self.pool.seal(self.prompt[:1])
        self.cache = KvCache(CONFIG, GEOMETRY)
        for layer in range(2):
            for plane in (self.cache.keys(layer), self.cache.values(layer)):
                plane[:] = torch.arange(1.0, GEOMETRY.end_block + 2).view(-1, 1, 1, 1)
        self.violations = Violations()
        self.keeping = BlockKeeping(self.cache, self.pool, self.violations, 2**20, torch.device("cpu"))

    def content(self) -> list[float]:
        """Of each block: the one number that it holds everywhere."""
        planes = [plane for layer in range(2) for plane in (self.cache.keys(layer), self.cache.values(layer))]
        for plane in planes:
            assert torch.equal(plane, plane[:, :1, :1, :1].expand_as(plane))
            assert torch.equal(plane, planes[0])
        return planes[0][:, 0, 0, 0].tolist()

    def told(self) -> list[tuple[int, int, Reason]]:
        """What was refused."""
        return [(violation.owner, violation.block, violation.reason) for violation in self.keeping.take_violations()]


def test_a_scrub_clears_open_blocks_of_its_owner_alone() -> None:
    """Not a sealed one, not another's, not the null block, and none that does not exist."""
    kept = Kept()
    before = kept.content()
    wanted = [kept.mine[0], kept.prompt[0], kept.prompt[1], kept.others[0], GEOMETRY.null_block, 99]
    kept.keeping.apply(BlockMoves(scrub=[(block, ME) for block in wanted]))
    for block in (kept.mine[0], kept.prompt[1]):
        before[block] = 0.0
    assert kept.content() == before
    assert kept.told() == [
        (ME, kept.prompt[0], Reason.NOT_OPEN),
        (ME, kept.others[0], Reason.FOREIGN),
        (ME, GEOMETRY.null_block, Reason.NOT_OPEN),
        (ME, 99, Reason.OUTSIDE),
    ]


def test_a_copy_reads_what_its_owner_may_read_into_its_own_block_of_the_right_region() -> None:
    """The tail of a prompt in front of its answer; zeros stand in for what is another's, and prompts' blocks are no target here."""
    kept = Kept()
    kept.cache.keys(0)[GEOMETRY.null_block] = kept.cache.values(0)[GEOMETRY.null_block] = 0.0
    kept.cache.keys(1)[GEOMETRY.null_block] = kept.cache.values(1)[GEOMETRY.null_block] = 0.0
    before = kept.content()
    copies = [(kept.prompt[0], kept.mine[0], ME), (kept.others[0], kept.mine[1], ME), (kept.prompt[0], kept.others[1], ME)]
    kept.keeping.apply(BlockMoves(copies=[*copies, (kept.prompt[0], kept.prompt[1], ME)]))
    before[kept.mine[0]], before[kept.mine[1]] = before[kept.prompt[0]], 0.0
    assert kept.content() == before
    assert kept.told() == [
        (ME, kept.others[0], Reason.UNREADABLE),
        (ME, kept.others[1], Reason.FOREIGN),
        (ME, kept.prompt[1], Reason.OUTSIDE),
    ]


def test_a_promotion_goes_to_the_prompts_region_alone() -> None:
    """And says whether all of it was done."""
    kept = Kept()
    before = kept.content()
    assert kept.keeping.promote([(kept.mine[0], kept.prompt[1], ME)])
    before[kept.prompt[1]] = before[kept.mine[0]]
    assert kept.content() == before
    assert not kept.keeping.promote([(kept.mine[0], kept.mine[1], ME)])
    assert kept.content() == before
    assert kept.told() == [(ME, kept.mine[1], Reason.OUTSIDE)]


def test_what_was_set_aside_comes_back_into_blocks_of_its_owner_alone() -> None:
    """Each copy to its place, also when one of the places is another's; and blocks of another are not set aside."""
    kept = Kept()
    before = kept.content()
    assert not kept.keeping.save(ME, [kept.mine[0], kept.others[0]])
    assert kept.told() == [(ME, kept.others[0], Reason.UNREADABLE)]
    assert kept.keeping.save(ME, kept.mine)
    kept.keeping.apply(BlockMoves(scrub=[(block, ME) for block in kept.mine]))
    more = kept.pool.allocate(Region.DECODE, 1, ME) or []
    kept.keeping.apply(BlockMoves(restores=[(ME, [kept.others[1], more[0]])]))
    first, second = kept.mine
    before[more[0]], before[first], before[second] = before[second], 0.0, 0.0
    assert kept.content() == before
    assert kept.told() == [(ME, kept.others[1], Reason.FOREIGN)]


def test_no_more_is_set_aside_than_there_is_room_for() -> None:
    """Of all owners together; what came back, or is not wanted any more, makes room."""
    kept = Kept()
    room = SwapSpace(kept.cache, 3 * kept.cache.block_bytes)
    assert room.save(ME, kept.mine)
    assert not room.save(OTHER, kept.others)
    assert room.used_bytes == 2 * kept.cache.block_bytes
    room.restore(ME, torch.tensor(kept.mine), torch.tensor([0, 1]))
    assert room.used_bytes == 0
    assert room.save(OTHER, [*kept.others, *kept.mine[:1]])
    room.drop(OTHER)
    room.drop(ME)
    assert room.used_bytes == 0
    assert room.save(ME, kept.mine)


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_without_memory_nothing_is_set_aside(error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is computed again: slower, and as right."""
    kept = Kept()

    def read(_blocks: Tensor) -> Tensor:
        raise error

    monkeypatch.setattr(kept.cache, "read", read)
    assert not kept.keeping.save(ME, kept.mine)
    assert "cannot be set aside and will be computed again" in caplog.text
