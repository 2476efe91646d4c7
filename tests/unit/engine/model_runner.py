"""A model of the cache that remembers whose token lies in every slot, under the real scheduler and pool.

It plays the runner: it writes what a chunk or a decode step writes, reads what attention reads, and finds what was
computed of other tokens, or nothing, wherever the real engine would have computed nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from appliance.engine.block_pool import BlockPool, BlockState, PoolGeometry, Region
from appliance.engine.messages import GenerateRequest, SamplingParams
from appliance.engine.scheduler import Chunk, Scheduler
from appliance.engine.sequence import Sequence, Stage


def make_sequence(arrival: int, prompt: int, answer: int, begun: int = 0, beginning: tuple[int, ...] = (), priority: int = 0) -> Sequence:
    """A request of so many tokens, each token id unlike any other, but for a beginning that others may have too; `begun` of its
    answer are from an earlier engine life."""
    ids = (*beginning[:prompt], *(arrival * 1000 + index for index in range(len(beginning), prompt)))
    request = GenerateRequest(f"r{arrival}", ids, SamplingParams(max_new_tokens=answer), (-1,) * begun, priority=priority)
    return Sequence(request, lambda _: None, arrival, 0, [*ids, *request.answer_ids])


class Engine:
    """The loop's use of the scheduler, over a model of the cache."""

    def __init__(self, geometry: PoolGeometry, max_running: int, chunk_tokens: int, swap_blocks: int = 0) -> None:
        self.geometry = geometry
        self.swap_blocks = swap_blocks
        self.saved: dict[int, list[list[int | None]]] = {}
        self.max_running, self.chunk_tokens = max_running, chunk_tokens
        self.pool = BlockPool(geometry)
        self.scheduler = Scheduler(self.pool, max_running, chunk_tokens, swap=self if swap_blocks else None)
        self.slots: dict[int, int | None] = {}
        self.finished: list[Sequence] = []

    def save(self, owner: int, blocks: Several[int]) -> bool:
        """As the runner does: what the blocks hold now, if they are the owner's and there is room."""
        for block in blocks:
            assert self.pool.owners[block] == owner, "saved what is somebody else's"
            assert self.pool.state(block) is BlockState.OPEN
        assert owner not in self.saved, "saved twice"
        if sum(map(len, self.saved.values())) + len(blocks) > self.swap_blocks:
            return False
        size = self.geometry.block_tokens
        self.saved[owner] = [[self.slots.get(block * size + offset) for offset in range(size)] for block in blocks]
        return True

    def drop(self, owner: int) -> None:
        """As the runner does."""
        self.saved.pop(owner, None)

    def step(self, fail: int | None = None) -> bool:
        """One turn; `fail`: the chunk with this index fails instead. False: nothing was done."""
        chunks = self.scheduler.plan_prefill()
        assert sum(chunk.count for chunk in chunks) <= self.chunk_tokens
        if chunks:  # moves wait for whoever touches blocks next, as in the loop
            self._apply_moves()
        for index, chunk in enumerate(chunks):
            if fail == index:
                self.scheduler.remove(chunk.sequence)
                continue
            self._prefill(chunk)
        decoding = self.scheduler.plan_decode()
        if decoding:
            self._apply_moves()
        for sequence in decoding:
            self._decode(sequence)
        self._promote()
        return bool(chunks or decoding)

    def _promote(self) -> None:
        """A block a step; all when nobody lives."""
        promotions = self.scheduler.plan_promotion(1 if list(self.scheduler) else None)
        for promotion in promotions:
            source, target = promotion.block.source, promotion.target
            assert (self.pool.region(source), self.pool.region(target)) == (Region.DECODE, Region.PREFILL)
            assert self.pool.state(target) is BlockState.OPEN
            self._copy(source, target)
        self.scheduler.promoted(promotions, written=True)

    def _copy(self, source: int, target: int) -> None:
        size = self.geometry.block_tokens
        for offset in range(size):
            self.slots[target * size + offset] = self.slots[source * size + offset]

    def _apply_moves(self) -> None:
        moves = self.scheduler.take_moves()
        size = self.geometry.block_tokens
        for block, owner in moves.scrub:
            assert self.pool.owners[block] == owner
            assert self.pool.state(block) is BlockState.OPEN
            for offset in range(size):
                self.slots[block * size + offset] = None
        for source, target, owner in moves.copies:
            assert self.pool.owners[target] == owner
            assert self.pool.state(target) is BlockState.OPEN
            self._copy(source, target)
        for owner, blocks in moves.restores:
            for block, content in zip(blocks, self.saved.pop(owner), strict=True):
                assert self.pool.owners[block] == owner
                assert self.pool.state(block) is BlockState.OPEN
                for offset, token in enumerate(content):
                    self.slots[block * size + offset] = token

    def _slot(self, sequence: Sequence, position: int) -> int:
        size = self.geometry.block_tokens
        return sequence.table(size)[position // size] * size + position % size

    def _write(self, sequence: Sequence, position: int, region: Region) -> None:
        slot = self._slot(sequence, position)
        block = slot // self.geometry.block_tokens
        assert self.pool.region(block) is region, f"{region} wrote block {block}"
        assert self.pool.state(block) is BlockState.OPEN, f"a {self.pool.state(block)} block was written"
        assert self.pool.owners[block] == sequence.arrival, "a block of somebody else was written"
        self.slots[slot] = hash(tuple(sequence.token_ids[: position + 1]))

    def _read(self, sequence: Sequence, up_to: int) -> None:
        for position in range(up_to + 1):
            found = self.slots.get(self._slot(sequence, position))
            wanted = hash(tuple(sequence.token_ids[: position + 1]))
            assert found == wanted, f"sequence {sequence.arrival} reads what is not its own at position {position}"

    def _prefill(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        replayed = sequence.answer_tokens > 0
        assert chunk.count > 0
        for position in range(chunk.start, chunk.start + chunk.count):
            self._write(sequence, position, Region.DECODE if position >= sequence.prompt_tokens else Region.PREFILL)
        self._read(sequence, chunk.start + chunk.count - 1)
        chooses = chunk.chooses
        assert chooses == (chunk.completes and not replayed)
        self.scheduler.prefilled(chunk)
        if chooses:
            self._accept(sequence)

    def _decode(self, sequence: Sequence) -> None:
        assert sequence.stage is Stage.DECODING
        position = len(sequence.token_ids) - 1
        self._write(sequence, position, Region.DECODE)
        self._read(sequence, position)
        self.scheduler.decoded(sequence)
        self._accept(sequence)

    def _accept(self, sequence: Sequence) -> None:
        sequence.token_ids.append(-1)
        if sequence.answer_tokens >= sequence.request.sampling.max_new_tokens:
            self.scheduler.retire(sequence)
            self.finished.append(sequence)
