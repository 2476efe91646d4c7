"""What a runner does with blocks between its passes: clears them, copies them, sets them aside, brings them back. On any device.

Every one of these is checked like a kernel's own write: against the block's word, its owner, and the region that may be written.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from appliance.engine.block_pool import BlockPool, Region
from appliance.engine.kv_cache import KvCache
from appliance.engine.scheduler import BlockMoves
from appliance.engine.swap import SwapSpace
from appliance_kernels.kv_write.reference import Guard, Violation, Violations, checked_tables, plan_blocks


class BlockKeeping:
    """Owns the cache's memory and what was set aside of it; a runner is one that computes as well."""

    def __init__(self, cache: KvCache, pool: BlockPool, violations: Violations, swap_bytes: int, device: torch.device) -> None:
        """What may be written of the cache is the pool's to say; `device` is where both lie, and what indexes them."""
        geometry = pool.geometry
        self._cache = cache
        self._geometry = geometry
        self._device = device
        self._swap = SwapSpace(cache, swap_bytes)
        self._violations = violations
        self._guards = {region: Guard(pool.words, pool.owners, *geometry.bounds(region)) for region in Region}
        self._whole = Guard(pool.words, pool.owners, 0, geometry.end_block)

    def check_guards(self) -> None:
        """Raises CacheCorrupt where something was written between the regions or behind them."""
        self._cache.check_guards()

    def take_violations(self) -> list[Violation]:
        """What was not written or read since the last call, because it was not to be. Waits for a card."""
        return self._violations.take()

    def apply(self, moves: BlockMoves) -> None:
        """Before anything else of a step."""
        if moves.scrub:
            blocks, owners = zip(*moves.scrub, strict=True)
            kept = plan_blocks(blocks, owners, self._whole, self._violations)
            self._cache.scrub(self._place(blocks)[kept])
        if moves.copies:
            self._copy(moves.copies, Region.DECODE)
        for owner, targets in moves.restores:
            kept = plan_blocks(targets, [owner] * len(targets), self._guards[Region.DECODE], self._violations)
            self._swap.restore(owner, self._place(targets)[kept], kept)

    def save(self, owner: int, blocks: Several[int]) -> bool:
        """Set aside what these blocks hold, for `apply` to bring back. False: no room, or not its blocks."""
        (readable,) = self._readable([blocks], [owner])
        return list(readable) == list(blocks) and self._swap.save(owner, blocks)

    def drop(self, owner: int) -> None:
        """What was set aside is not wanted any more."""
        self._swap.drop(owner)

    def promote(self, copies: Several[tuple[int, int, int]]) -> bool:
        """(from, to, owner): blocks of finished answers into the prompts' region. False: one of them was refused."""
        self._copy(copies, Region.PREFILL)
        return not self._violations.count

    def _copy(self, copies: Several[tuple[int, int, int]], region: Region) -> None:
        """(from, to, owner), in all layers, into this region."""
        sources, targets, owners = zip(*copies, strict=True)
        readable = self._readable([[source] for source in sources], owners)
        kept = plan_blocks(targets, owners, self._guards[region], self._violations)
        self._cache.copy(self._place([source for (source,) in readable])[kept], self._place(targets)[kept])

    def _readable(self, tables: Several[Several[int]], owners: Several[int]) -> Several[Several[int]]:
        return checked_tables(tables, owners, self._whole, self._geometry.null_block, self._violations)

    def _place(self, numbers: Several[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)
