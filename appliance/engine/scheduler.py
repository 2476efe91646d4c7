"""Who is computed next: admission, chunks of prefill, decode batches, preemption. Host logic over block numbers; no torch.

Prefill and decode are separate stages. The loop runs one chunk of prefill, then one decode step of everybody who decodes,
and so on: a decode step is never delayed by more than one chunk.

Who is first, order.py says: by priority and arrival, and nobody waits for ever. Admission, the shares of a chunk, and who keeps what it
has all follow that order.

Under pressure: the prefill region full → prompts wait. The decode region full → the last in order gives its decode blocks back.
What they hold is set aside in other memory and brought back later (swap.py); where there is no room for that, its answer so far
is computed again (same tokens, same positions, so the same numbers). Its prompt stays where it is.
The first always goes on, because a request that could not finish alone is refused at the door.

What begins as something did that was computed before takes its blocks (prefix_cache.py): full ones only, and never the last
token, whose logits are wanted. What is only kept gives way to whoever needs the room.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

from appliance.engine.block_pool import BlockPool, BlockState, Region
from appliance.engine.order import note_admission, note_preemption, rank
from appliance.engine.prefix_cache import PrefixCache, Promotion, Promotions, chain
from appliance.engine.sequence import Sequence, Stage

JUDGED_CHUNK_TOKENS = 64
"""Of a prompt whose tokens' likelihoods are wanted: each of them takes a row of logits and a sum over the vocabulary."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of one sequence, to be computed in one prefill step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """It is the last one before the sequence decodes."""
        return self.start + self.count == self.sequence.prefill_target_tokens

    @property
    def chooses(self) -> bool:
        """Its last token's logits choose the first token of the answer; not so when an answer is computed again."""
        return self.completes and self.sequence.answer_tokens == 0


@dataclass(slots=True)
class BlockMoves:
    """What must happen to blocks before the next step touches them, in this order.

    Attributes:
        scrub: (block, owner), newly held: what the last holder left must not be there (0 · NaN is NaN, even under a mask).
        copies: (from, to, owner): the tail of a prompt into the first block of its answer.
        restores: (owner, blocks): what was set aside for it comes back into these.
    """

    scrub: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    restores: list[tuple[int, list[int]]] = field(default_factory=list)


class Swap(Protocol):
    """Where answers are set aside; swap.py, through the runner."""

    def save(self, owner: int, blocks: Several[int]) -> bool:
        """Copy what these hold, now. False: there is no room for it, or they are not the owner's."""

    def drop(self, owner: int) -> None:
        """What was set aside for it is not wanted any more; nothing to do where there is nothing."""


class Scheduler:
    """Owns the queues, and every sequence's stage and blocks.

    Attributes:
        cache: beginnings that were computed before.
        chunk_tokens: of one prefill step.
        preemptions, swaps, cached_tokens: so far; swaps are the preemptions that were set aside, the last are of prompts, found in
            the cache.
    """

    def __init__(self, pool: BlockPool, max_running: int, chunk_tokens: int, prefix_cache: bool = True, swap: Swap | None = None) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool)
        self.preemptions = self.swaps = self.cached_tokens = 0
        self._swap = swap
        self._caching = prefix_cache
        self._promotions = Promotions(pool, self.cache)
        self._max_running = max_running
        self.chunk_tokens = chunk_tokens
        self._block_tokens = pool.geometry.block_tokens
        self._waiting: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._moves = BlockMoves()

    @property
    def running(self) -> int:
        """Sequences being computed."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sequences that are not: new ones and preempted ones."""
        return len(self._waiting) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        """Every living sequence."""
        for queue in (self._preempted, self._prefilling, self._decoding, self._waiting):
            yield from queue

    def add(self, sequence: Sequence) -> None:
        """Queue a new one."""
        sequence.digests = chain(sequence.request.prompt_ids, self._block_tokens) if self._caching else []
        if sequence.request.sampling.prompt_logprobs is not None:
            sequence.most_chunk_tokens = JUDGED_CHUNK_TOKENS
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is finished, aborted or failed: its blocks are free."""
        self._leave_queues(sequence)
        self._forget_saved(sequence)
        self._release(sequence.blocks)
        sequence.prompt_blocks, sequence.decode_blocks = [], []
        sequence.stage = Stage.FINISHED

    def retire(self, sequence: Sequence) -> None:
        """It has its answer: as `remove`, but the answer's full blocks are held until they are promoted or somebody needs them."""
        if not self._caching or not sequence.decode_blocks:
            self.remove(sequence)
            return
        self._leave_queues(sequence)
        self._cancel_moves(sequence.blocks)
        self._promotions.take(sequence)
        sequence.prompt_blocks, sequence.decode_blocks = [], []
        sequence.stage = Stage.FINISHED

    def plan_promotion(self, most_blocks: int | None) -> list[Promotion]:
        """Up to so many blocks of finished answers, or all, to be copied for the next turn; `promoted` must follow at once."""
        return self._promotions.plan(most_blocks)

    def promoted(self, promotions: list[Promotion], written: bool) -> None:
        """The copies were made, or refused."""
        self._promotions.done(promotions, written)

    def disown(self, sequences: Several[Sequence]) -> int:
        """A kernel refused to write for these, so what they believe to hold is not to be relied on: they leave without giving
        anything back, all before it is counted what the others hold, and every block's word becomes that. They are as they were before
        they came, but for their tokens. Returns how many blocks' words changed."""
        for sequence in sequences:
            self._leave_queues(sequence)
            self._forget_saved(sequence)
            self._cancel_moves(sequence.blocks)
            sequence.prompt_blocks, sequence.decode_blocks = [], []
            sequence.computed_tokens = 0
            sequence.stage = Stage.WAITING
        return self.pool.reconcile(self._held(), self.cache.blocks)

    def _held(self) -> Iterator[list[int]]:
        yield from (sequence.blocks for sequence in self)
        yield self._promotions.blocks

    def _release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self._cancel_moves(blocks)

    def _cancel_moves(self, blocks: list[int]) -> None:
        """Nothing is to be written any more to blocks that somebody else may get within this very step."""
        if self._moves.scrub or self._moves.copies or self._moves.restores:
            gone = set(blocks)
            self._moves.restores = [move for move in self._moves.restores if gone.isdisjoint(move[1])]
            self._moves.scrub = [move for move in self._moves.scrub if move[0] not in gone]
            self._moves.copies = [move for move in self._moves.copies if move[1] not in gone]

    def _leave_queues(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._preempted, self._prefilling, self._decoding):
            if sequence in queue:
                queue.remove(sequence)

    def plan_prefill(self) -> list[Chunk]:
        """Admit who can be, and share one step's tokens among those who prefill, in order. May be empty."""
        while self._admit_next():
            pass
        chunks, budget = [], self.chunk_tokens
        for sequence in sorted(self._prefilling, key=rank):
            if not budget:
                break
            count = min(sequence.prefill_target_tokens - sequence.computed_tokens, budget, sequence.most_chunk_tokens or budget)
            chunks.append(Chunk(sequence, sequence.computed_tokens, count))
            budget -= count
        return chunks

    def prefilled(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in the cache. A completed prompt is sealed."""
        sequence, completes = chunk.sequence, chunk.completes
        sequence.computed_tokens += chunk.count
        if not completes:
            return
        self._prefilling.remove(sequence)
        self.pool.seal(block for block in sequence.prompt_blocks if self.pool.state(block) is BlockState.OPEN)
        for digest, block in zip(sequence.digests, sequence.prompt_blocks, strict=False):
            self.cache.keep(digest, block)
        self.cache.touch(sequence.digests)  # in the order in which they go, should its client leave
        if sequence.answer_tokens and not sequence.decode_blocks:
            self._set_aside(sequence)  # its answer began in an earlier life: from here on it is like a preempted one
        else:
            self._start_decoding(sequence)

    def plan_decode(self) -> list[Sequence]:
        """Who decodes one token now: each has room for its newest token. May preempt; may be empty."""
        for sequence in sorted(self._decoding, key=rank):
            if sequence.stage is Stage.DECODING:
                self._make_room(sequence)
        return sorted(self._decoding, key=lambda sequence: sequence.arrival)

    def decoded(self, sequence: Sequence) -> None:
        """Its newest token's keys and values are in the cache."""
        sequence.computed_tokens += 1

    def take_moves(self) -> BlockMoves:
        """What was put off since the last call."""
        moves, self._moves = self._moves, BlockMoves()
        return moves

    def check_integrity(self) -> None:
        """Raises PoolCorrupt when the blocks do not add up."""
        self.pool.check_integrity(self._held(), self.cache.blocks)

    def _admit_next(self) -> bool:
        """The first in order: who needs less room does not overtake it. But where it cannot, the first of those who gave way comes back:
        they hold room for their prompts, which may be just what the other one waits for."""
        if self.running >= self._max_running:
            return False
        first = min((*self._preempted, *self._waiting), key=rank, default=None)
        back = min(self._preempted, key=rank, default=None)
        for sequence in dict.fromkeys((first, back)):
            if sequence is not None and (self._resume(sequence) if sequence in self._preempted else self._admit(sequence)):
                note_admission(sequence, (*self._preempted, *self._prefilling, *self._waiting))
                return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """The whole prompt or nothing; and not where those who run need the last blocks for their next tokens."""
        if not self._decode_room(self.running + 1):
            return False
        found = self.cache.find(sequence.digests[: self._reusable_blocks(sequence)])
        self.pool.retain(found)
        missing = self.pool.geometry.blocks_for(sequence.prompt_tokens) - len(found)
        if not self._prefill_room(missing):
            self.pool.release(found)
            return False
        blocks = self._allocate(Region.PREFILL, missing, sequence)
        assert blocks is not None, "checked above"
        self._waiting.remove(sequence)
        sequence.prompt_blocks = found + blocks
        sequence.computed_tokens = sequence.cached_tokens = len(found) * self._block_tokens
        self.cached_tokens += sequence.cached_tokens
        sequence.stage = Stage.PREFILLING
        self._prefilling.append(sequence)
        return True

    def _reusable_blocks(self, sequence: Sequence) -> int:
        """Of its prompt, from the first: not those of a token whose logits are wanted."""
        judged = sequence.request.sampling.prompt_logprobs is not None
        return 0 if judged else (sequence.prompt_tokens - 1) // self._block_tokens

    def _resume(self, sequence: Sequence) -> bool:
        """A preempted one comes back with room for all of its answer so far, and some to spare for the others."""
        if not self._decode_room(self._missing_blocks(sequence) + self.running):
            return False
        self._preempted.remove(sequence)
        room = self._take_decode_blocks(sequence)
        assert room, "checked above"
        if sequence.computed_tokens == sequence.prefill_target_tokens:
            self._start_decoding(sequence)
        else:
            sequence.stage = Stage.PREFILLING
            self._prefilling.append(sequence)
        return True

    def _start_decoding(self, sequence: Sequence) -> None:
        sequence.stage = Stage.DECODING
        self._decoding.append(sequence)

    def _make_room(self, sequence: Sequence) -> None:
        """Blocks for the newest token, at the cost of the last in order if need be; that may be this one."""
        while not self._take_decode_blocks(sequence):
            holders = [other for other in (*self._prefilling, *self._decoding) if other.decode_blocks or other is sequence]
            last = max(holders, key=rank)
            self._preempt(last)
            note_preemption(last, holders)
            if last is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        (self._prefilling if sequence.stage is Stage.PREFILLING else self._decoding).remove(sequence)
        sequence.saved_blocks = self._save(sequence)
        self._release(sequence.decode_blocks)
        sequence.decode_blocks = []
        if not sequence.saved_blocks:
            sequence.computed_tokens = sequence.prompt_tokens
        self._set_aside(sequence)
        self.preemptions += 1

    def _save(self, sequence: Sequence) -> int:
        """How many of its decode blocks are set aside; 0: none, what they hold has to be computed again."""
        if self._swap is None or sequence.computed_tokens == sequence.prompt_tokens:
            return 0
        coming = [blocks for owner, blocks in self._moves.restores if owner == sequence.arrival]
        if coming:  # it had not come back yet
            return len(coming[0])
        if not self._swap.save(sequence.arrival, sequence.decode_blocks):
            return 0
        self.swaps += 1
        return len(sequence.decode_blocks)

    def _forget_saved(self, sequence: Sequence) -> None:
        if self._swap is not None:
            self._swap.drop(sequence.arrival)
        sequence.saved_blocks = 0

    def _set_aside(self, sequence: Sequence) -> None:
        sequence.stage = Stage.WAITING
        self._preempted.append(sequence)

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Of the decode region, to hold everything from the prompt's last full block to the newest token."""
        full_tokens = sequence.prompt_tokens // self._block_tokens * self._block_tokens
        return self.pool.geometry.blocks_for(len(sequence.token_ids) - full_tokens) - len(sequence.decode_blocks)

    def _take_decode_blocks(self, sequence: Sequence) -> bool:
        missing = self._missing_blocks(sequence)
        blocks = self._allocate(Region.DECODE, missing, sequence) if missing <= 0 or self._decode_room(missing) else None
        if blocks is None:
            return False
        if sequence.saved_blocks:
            self._moves.restores.append((sequence.arrival, blocks[: sequence.saved_blocks]))
            sequence.saved_blocks = 0
        elif blocks and not sequence.decode_blocks and sequence.prompt_tokens % self._block_tokens:
            self._moves.copies.append((sequence.prompt_blocks[-1], blocks[0], sequence.arrival))
        sequence.decode_blocks += blocks
        return True

    def _prefill_room(self, blocks: int) -> bool:
        """Make it, of what is only kept, unless that is too little."""
        free = self.pool.free_blocks(Region.PREFILL)
        if blocks > free + self.pool.kept_blocks:
            return False
        self.cache.make_room(blocks - free)
        return True

    def _decode_room(self, blocks: int) -> bool:
        """Make it, of answers that wait to be promoted."""
        while self.pool.free_blocks(Region.DECODE) < blocks:
            if not self._promotions.give_up():
                return False
        return True

    def _allocate(self, region: Region, count: int, sequence: Sequence) -> list[int] | None:
        blocks = self.pool.allocate(region, count, sequence.arrival)
        if blocks:
            self._moves.scrub += [(block, sequence.arrival) for block in blocks]
        return blocks
