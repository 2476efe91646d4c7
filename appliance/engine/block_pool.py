"""KV blocks by number: two disjoint regions of one cache, and who may write what.

Blocks 0 to prefill_blocks − 1 hold prompts; then comes the null block, of zeros; those behind it hold answers. A prompt's blocks
are sealed when its prefill ends and never written again; from then on they may be shared. A block of the decode region is
private to one sequence. So no block that anyone writes is ever shared.

All that is known of a block is its word (kernels/refcount) and its owner, in two tensors that the kernels read; what is free,
held or kept is looked up in them, and nothing is counted a second time here. One thread, the engine's, calls all of this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.core.errors import BudgetError
from appliance.core.units import format_bytes
from appliance_kernels.refcount.reference import FREE, HOLDERS, KEPT, OPEN, REFUSED, SEALED, Step, count_held, free_blocks, take_step

Steps = Callable[[Tensor, Sequence[int], Step], list[int]]
"""As refcount.reference.take_step. On a card it returns when all that was launched before is done: what a block holds is there before
its word says so, and an error of a kernel is raised in the step of the sequence that it was launched for."""


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
    """Held by one or several, and read only from now on."""
    KEPT = "kept"
    """Sealed, and kept by the prefix cache beyond its last holder."""


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
        """One more block, of zeros, that nobody writes: what a table points to past its end, and what lies between the regions."""
        return self.prefill_blocks

    @property
    def end_block(self) -> int:
        """All block numbers are below it, the null block's too."""
        return self.total_blocks + 1

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
        return (0, self.prefill_blocks) if region is Region.PREFILL else (self.prefill_blocks + 1, self.end_block)

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
    """Owns every block's word and owner, where the kernels are that read them.

    Attributes:
        words: [end_block], int32; see kernels/refcount.
        owners: [end_block], int64: who claimed it last, and alone may write it while it is open.
    """

    def __init__(self, geometry: PoolGeometry, steps: Steps = take_step, device: torch.device | None = None) -> None:
        """On the CPU, or with the steps of a card on that card."""
        self.geometry = geometry
        self.words: Tensor = torch.zeros(geometry.end_block, dtype=torch.int32, device=device)
        self.owners: Tensor = torch.zeros(geometry.end_block, dtype=torch.int64, device=device)
        self._steps = steps

    def beside(self, geometry: PoolGeometry) -> BlockPool:
        """Another one on the same device."""
        return BlockPool(geometry, self._steps, self.words.device)

    def free_blocks(self, region: Region) -> int:
        """How many are left, without those that the prefix cache could let go."""
        first, end = self.geometry.bounds(region)
        return end - first - int(torch.count_nonzero(self.words[first:end]))

    @property
    def used_blocks(self) -> int:
        """Held by sequences, of both regions."""
        return count_held(self.words)

    @property
    def kept_blocks(self) -> int:
        """Held by nobody, kept by the prefix cache."""
        return int(torch.count_nonzero(self.words == SEALED | KEPT))

    def allocate(self, region: Region, count: int, owner: int) -> list[int] | None:
        """So many open blocks of this owner's, or None when there are not enough now; never a part."""
        if count <= 0:
            return []
        candidates = free_blocks(self.words, *self.geometry.bounds(region), count)
        if candidates.numel() < count:
            return None
        blocks: list[int] = candidates.tolist()
        self._take(blocks, Step.CLAIM)
        self.owners[candidates] = owner
        return blocks

    def seal(self, blocks: Iterable[int]) -> None:
        """These are read only from now on.

        Raises:
            PoolCorrupt: one is not open, or not of the prefill region.
        """
        chosen = list(blocks)
        for block in chosen:
            if self.region(block) is not Region.PREFILL:
                raise PoolCorrupt(f"block {block} of the decode region was to be sealed; please report this")
        self._take(chosen, Step.SEAL)

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold sealed blocks once more.

        Raises:
            PoolCorrupt: one is free, or still written.
        """
        self._take(blocks, Step.RETAIN)

    def keep(self, block: int) -> None:
        """The prefix cache keeps a sealed block beyond its last holder.

        Raises:
            PoolCorrupt: it is not sealed, held by nobody, or kept already.
        """
        self._take([block], Step.KEEP)

    def evict(self, block: int) -> bool:
        """The prefix cache lets go of a block, unless somebody holds it."""
        return self._steps(self.words, [block], Step.EVICT) == [FREE]

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            PoolCorrupt: nobody holds one.
        """
        self._take(blocks, Step.RELEASE)

    def state(self, block: int) -> BlockState:
        """Of one block."""
        word = int(self.words[block])
        if word == FREE:
            return BlockState.FREE
        if not word & SEALED:
            return BlockState.OPEN
        return BlockState.KEPT if word & KEPT else BlockState.SEALED

    def region(self, block: int) -> Region:
        """Where it lies."""
        return Region.PREFILL if block < self.geometry.prefill_blocks else Region.DECODE

    def check_integrity(self, held: Iterable[Sequence[int]], kept: Iterable[int]) -> None:
        """In each region: free plus held plus kept alone is everything; every count is the number of its holders; who writes
        is alone; the prefix cache keeps what it believes to keep.

        Args:
            held: the blocks of every living sequence.
            kept: the blocks of the prefix cache.

        Raises:
            PoolCorrupt: with the numbers.
        """
        counted, believed = self._expected(held, kept)
        for region in Region:
            first, end = self.geometry.bounds(region)
            words, holders, keeps = self.words[first:end], counted[first:end], believed[first:end]
            sealed = words & SEALED
            wrong = (words & HOLDERS != holders) | (words & KEPT != keeps)
            wrong |= (sealed == 0) & (words & ~OPEN != 0) | (words == SEALED)
            if region is Region.DECODE:
                wrong |= sealed != 0
            if wrong.any():
                raise PoolCorrupt(self._imbalance(region, words, holders, keeps, int(wrong.nonzero()[0])))

    def reconcile(self, held: Iterable[Sequence[int]], kept: Iterable[int]) -> int:
        """After a violation, when what a sequence believed to hold cannot be given back by its word: every count becomes the
        number of holders that are left. Returns how many words that changed.

        Args:
            held: the blocks of every sequence that is left.
            kept: the blocks of the prefix cache.
        """
        holders, believed = self._expected(held, kept)
        sealed = self.words & SEALED
        sealed[: self.geometry.prefill_blocks] |= believed[: self.geometry.prefill_blocks] * (SEALED // KEPT)
        right = torch.where(holders + believed > 0, holders + believed + sealed, FREE)
        changed = int(torch.count_nonzero(right != self.words))
        self.words.copy_(right)
        return changed

    def _expected(self, held: Iterable[Sequence[int]], kept: Iterable[int]) -> tuple[Tensor, Tensor]:
        """A word's two other parts, as those who hold and keep see them: [blocks] each. A number that is no block, of a torn table that was
        not noticed yet, holds nothing."""
        count = self.words.shape[0]
        holders, believed = (torch.zeros(count, dtype=torch.int32) for _ in range(2))
        for blocks in held:
            known = [block for block in blocks if 0 <= block < count]
            holders.index_add_(0, torch.tensor(known, dtype=torch.int64), torch.ones(len(known), dtype=torch.int32))
        believed[torch.tensor(list(kept), dtype=torch.int64)] = KEPT
        return holders.to(self.words.device), believed.to(self.words.device)

    def _imbalance(self, region: Region, words: Tensor, holders: Tensor, keeps: Tensor, at: int) -> str:
        def count(which: Tensor) -> int:
            return int(torch.count_nonzero(which))

        return (
            f"KV blocks of the {region.value} region do not add up: {count(words == FREE)} free + {count(holders)} held"
            f" + {count((holders == 0) & (keeps != 0))} kept != {words.numel()}, {count(words & HOLDERS)} marked as held; first at block"
            f" {at + self.geometry.bounds(region)[0]}: word {int(words[at]):#x}, {int(holders[at])} holders; please report this"
        )

    def _take(self, blocks: Iterable[int], step: Step) -> None:
        chosen = list(blocks)
        for block, result in zip(chosen, self._steps(self.words, chosen, step), strict=True):
            if result < 0:
                word = f" with word {int(self.words[block]):#x}" if result == REFUSED else ""
                raise PoolCorrupt(f"block {block}{word} refuses the step {step.name.lower()}; please report this")
