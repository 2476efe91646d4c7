"""Beginnings that were computed before: sealed blocks by what they hold, the least recently used one given up first.

A block's keys and values depend on all tokens up to its end and on nothing else (docs/adr/0002-batch-invariance.md), so a block
is known by a digest of these, chained: digest_i = H(digest_(i−1), tokens of block i). Whoever begins alike takes the very blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

from appliance.engine.block_pool import BlockPool, Region
from appliance.engine.sequence import Sequence

_DIGEST_BYTES = 16


def chain(token_ids: Several[int], block_tokens: int, begun: Several[bytes] = ()) -> list[bytes]:
    """The digests of all full blocks of these tokens; the first ones are known already."""
    digests = list(begun)
    for start in range(len(digests) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array("q", token_ids[start : start + block_tokens])
        parent = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(parent + block.tobytes(), digest_size=_DIGEST_BYTES).digest())
    return digests


class PrefixCache:
    """Owns what is kept: which blocks, under which digest, in which order they go.

    Attributes:
        evictions: blocks given up so far.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.evictions = 0
        self._pool = pool
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # the next one to go first

    @property
    def blocks(self) -> Iterator[int]:
        """All that is kept, held or not."""
        return iter(self._blocks.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def find(self, digests: Several[bytes]) -> list[int]:
        """The blocks of the longest beginning that is here. The caller retains them before anything else happens."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        self.touch(digests[: len(found)])
        return found

    def touch(self, digests: Several[bytes]) -> None:
        """These were just used. A beginning outlives what follows it: without it, that would be found no more."""
        for digest in reversed(digests):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)

    def keep(self, digest: bytes, block: int) -> None:
        """Keep a sealed block that is held now. Where there is one with the same digest, that one stays: tables do not change."""
        if digest not in self._blocks:
            self._pool.keep(block)
            self._blocks[digest] = block

    def make_room(self, count: int) -> None:
        """Give up so many blocks that nobody holds, or as many as there are."""
        for digest, block in list(self._blocks.items()):
            if count <= 0:
                return
            if self._pool.evict(block):
                del self._blocks[digest]
                self.evictions += 1
                count -= 1

    def forget(self, digests: Iterable[bytes]) -> None:
        """Give these up, where nobody holds them."""
        for digest in digests:
            if digest in self._blocks and self._pool.evict(self._blocks[digest]):
                del self._blocks[digest]


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """A full block of a finished answer."""

    source: int
    owner: int
    digest: bytes
    parent: bytes
    """The digest of what comes before it; empty for the first block of all."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A copy to be made: into an open block of the prefill region."""

    block: AnswerBlock
    target: int


class Promotions:
    """Owns the blocks of finished answers until they are copied into the prefix cache, so that the next turn of a
    conversation finds them: a copy, because answers lie in the decode region and what is shared lies in the other."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._waiting: deque[AnswerBlock] = deque()

    @property
    def blocks(self) -> list[int]:
        """All that is held."""
        return [block.source for block in self._waiting]

    def take(self, sequence: Sequence) -> None:
        """Take over a finished sequence's full answer blocks; the rest of what it holds is released."""
        block_tokens = self._pool.geometry.block_tokens
        first = sequence.prompt_tokens // block_tokens
        digests = chain(sequence.token_ids[: sequence.computed_tokens], block_tokens, sequence.digests)
        self._cache.touch(digests)
        for index, source in zip(range(first, len(digests)), sequence.decode_blocks, strict=False):
            self._waiting.append(AnswerBlock(source, sequence.arrival, digests[index], digests[index - 1] if index else b""))
        self._pool.release(sequence.prompt_blocks)
        self._pool.release(sequence.decode_blocks[len(digests) - first :])

    def give_up(self) -> bool:
        """Release the block that has waited longest, for somebody who needs it more. False: there is none."""
        if not self._waiting:
            return False
        self._pool.release([self._waiting.popleft().source])
        return True

    def plan(self, most_blocks: int | None) -> list[Promotion]:
        """Up to so many copies, or all; `done` must follow at once."""
        planned: list[Promotion] = []
        coming: set[bytes] = set()
        while self._waiting and (most_blocks is None or len(planned) < most_blocks):
            block = self._waiting.popleft()
            target = self._room(block.owner) if self._is_wanted(block, coming) else None
            if target is None:
                self._pool.release([block.source])
                continue
            coming.add(block.digest)
            planned.append(Promotion(block, target))
        return planned

    def done(self, promotions: Several[Promotion], written: bool) -> None:
        """The copies are made, and kept; or they were refused, and what the targets hold is nobody's."""
        for promotion in promotions:
            if written:
                self._pool.seal([promotion.target])
                self._cache.keep(promotion.block.digest, promotion.target)
            self._pool.release([promotion.block.source, promotion.target])

    def _is_wanted(self, block: AnswerBlock, coming: set[bytes]) -> bool:
        """Not there yet, and will be found: what comes before it is there."""
        known = block.digest in self._cache or block.digest in coming
        return not known and (not block.parent or block.parent in self._cache or block.parent in coming)

    def _room(self, owner: int) -> int | None:
        if not self._pool.free_blocks(Region.PREFILL):
            self._cache.make_room(1)
        blocks = self._pool.allocate(Region.PREFILL, 1, owner)
        return blocks[0] if blocks else None
