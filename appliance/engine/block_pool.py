"""KV blocks by number: two disjoint regions of one cache, and who may write what.

Blocks 0 to prefill_blocks − 1 hold prompts; the rest hold answers. A prompt's blocks are sealed when its prefill ends and
never written again; a block of the decode region is private to one sequence. So no block that anyone writes is ever shared.
One thread, the engine's, calls all of this.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.core.errors import BudgetError
from appliance.core.units import format_bytes


class Region(enum.Enum):
    """A half of the cache."""

    PREFILL = "prefill"
    DECODE = "decode"


class BlockState(enum.Enum):
    """What may be done with a block."""

    FREE = "free"
    OPEN = "open"
    """Held by one sequence, which may write it."""
    SEALED = "sealed"
    """Held, and read only from now on."""


class PoolCorrupt(AssertionError):
    """The books do not balance: a defect of ours. The message has the numbers."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """How the cache is divided."""

    block_tokens: int
    prefill_blocks: int
    decode_blocks: int

    @property
    def total_blocks(self) -> int:
        """Usable blocks of both regions."""
        return self.prefill_blocks + self.decode_blocks

    @property
    def null_block(self) -> int:
        """One more block, of zeros, that nobody writes: what a table points to past its end."""
        return self.total_blocks

    @property
    def prefill_tokens(self) -> int:
        """The longest prompt."""
        return self.prefill_blocks * self.block_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode region."""
        return self.decode_blocks * self.block_tokens

    def bounds(self, region: Region) -> tuple[int, int]:
        """First block, and the one past the last."""
        return (0, self.prefill_blocks) if region is Region.PREFILL else (self.prefill_blocks, self.total_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    @classmethod
    def divide(cls, pool_bytes: int, bytes_per_token: int, block_tokens: int, prefill_fraction: float) -> PoolGeometry:
        """The geometry of so many bytes, the null block included.

        Raises:
            BudgetError: a region would have no block.
        """
        block_bytes = block_tokens * bytes_per_token
        total = pool_bytes // block_bytes - 1
        prefill = round(total * prefill_fraction)
        if prefill < 1 or total - prefill < 1:
            raise BudgetError(
                f"a KV pool of {format_bytes(pool_bytes)} holds {total + 1} blocks of {block_tokens} tokens"
                f" ({format_bytes(block_bytes)} each): at a prefill fraction of {prefill_fraction} one region would have none",
                hint=f"raise [engine] kv_pool_bytes to at least {format_bytes(8 * block_bytes)}, or lower block_tokens",
            )
        return cls(block_tokens, prefill, total - prefill)


class BlockPool:
    """Owns the free lists and every block's state."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self._states = [BlockState.FREE] * geometry.total_blocks
        # Popped from the end: low numbers first, and a block that was just freed, still in the CPU's cache, soonest.
        self._free = {region: list(reversed(range(*geometry.bounds(region)))) for region in Region}

    def free_blocks(self, region: Region) -> int:
        """How many are left."""
        return len(self._free[region])

    @property
    def used_blocks(self) -> int:
        """Of both regions."""
        return self.geometry.total_blocks - sum(len(free) for free in self._free.values())

    def allocate(self, region: Region, count: int) -> list[int] | None:
        """So many open blocks, or None when there are not enough now; never a part."""
        free = self._free[region]
        if count > len(free):
            return None
        blocks = [free.pop() for _ in range(count)]
        for block in blocks:
            self._move(block, BlockState.FREE, BlockState.OPEN)
        return blocks

    def seal(self, blocks: Iterable[int]) -> None:
        """These are read only from now on.

        Raises:
            PoolCorrupt: one is not open, or not of the prefill region.
        """
        for block in blocks:
            if self.region(block) is not Region.PREFILL:
                raise PoolCorrupt(f"block {block} of the decode region was to be sealed; please report this")
            self._move(block, BlockState.OPEN, BlockState.SEALED)

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            PoolCorrupt: one is free already.
        """
        for block in blocks:
            if self._states[block] is BlockState.FREE:
                raise PoolCorrupt(f"block {block} was freed twice; please report this")
            self._states[block] = BlockState.FREE
            self._free[self.region(block)].append(block)

    def state(self, block: int) -> BlockState:
        """Of one block."""
        return self._states[block]

    def region(self, block: int) -> Region:
        """Where it lies."""
        return Region.PREFILL if block < self.geometry.prefill_blocks else Region.DECODE

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Free plus held is everything, in each region, and nobody holds what another holds.

        Args:
            held: the blocks of every living sequence.

        Raises:
            PoolCorrupt: with the numbers.
        """
        owned = [block for blocks in held for block in blocks]
        twice = len(owned) - len(set(owned))
        if twice:
            raise PoolCorrupt(f"{twice} of {len(owned)} held KV blocks are held twice; please report this")
        for region in Region:
            total = len(range(*self.geometry.bounds(region)))
            free = self._free[region]
            mine = [block for block in owned if self.region(block) is region]
            marked = sum(self._states[block] is not BlockState.FREE for block in range(*self.geometry.bounds(region)))
            if len(set(free)) != len(free) or len(free) + len(mine) != total or marked != len(mine) or set(free) & set(mine):
                raise PoolCorrupt(
                    f"KV blocks of the {region.value} region do not add up: {len(free)} free ({len(set(free))} different)"
                    f" + {len(mine)} held != {total}, {marked} marked as held; please report this"
                )

    def _move(self, block: int, before: BlockState, after: BlockState) -> None:
        if self._states[block] is not before:
            raise PoolCorrupt(f"block {block} is {self._states[block].value}, expected {before.value}; please report this")
        self._states[block] = after
