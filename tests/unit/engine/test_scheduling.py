"""The scheduler and the pool against a model of the cache that remembers whose token lies in every slot.

The model plays the runner: it writes what a chunk or a decode step writes, reads what attention reads, and finds what was
computed of other tokens, or nothing, wherever the real engine would have computed nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.engine import order
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
        self._apply_moves()
        for index, chunk in enumerate(chunks):
            if fail == index:
                self.scheduler.remove(chunk.sequence)
                continue
            self._prefill(chunk)
        decoding = self.scheduler.plan_decode()
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


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of all sizes that fit alone come, go, fail and are aborted in any order, in pools from roomy to absurd."""

    @initialize(
        block_tokens=st.integers(1, 5),
        prefill_blocks=st.integers(1, 8),
        decode_blocks=st.integers(1, 8),
        max_running=st.integers(1, 5),
        chunk_tokens=st.integers(1, 12),
        swap_blocks=st.sampled_from((0, 1, 3, 100)),
    )
    def build(
        self, block_tokens: int, prefill_blocks: int, decode_blocks: int, max_running: int, chunk_tokens: int, swap_blocks: int
    ) -> None:
        self.engine = Engine(PoolGeometry(block_tokens, prefill_blocks, decode_blocks), max_running, chunk_tokens, swap_blocks)
        self.arrivals = 0
        self.submitted = 0
        self.dropped = 0

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Only what could run alone: the loop refuses the rest at the door."""
        geometry = self.engine.geometry
        prompt = data.draw(st.integers(1, geometry.prefill_tokens))
        room = geometry.decode_tokens - prompt % geometry.block_tokens + 1
        answer = data.draw(st.integers(1, max(1, min(room, 12))))
        begun = data.draw(st.integers(0, answer - 1))
        known = [tuple(sequence.token_ids) for sequence in self.engine.finished[-3:]] + [(7, 8, 9, 7, 8, 9, 7, 8, 9), ()]
        beginning = data.draw(st.sampled_from(known))
        self.arrivals += 1
        self.submitted += 1
        priority = data.draw(st.sampled_from((0, 0, 0, -3, 7)))
        self.engine.scheduler.add(make_sequence(self.arrivals, prompt, answer, begun, beginning, priority))

    @rule(turns=st.integers(1, 6))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @rule(chunk=st.integers(0, 2))
    def run_with_a_failing_prefill(self, chunk: int) -> None:
        before = len(list(self.engine.scheduler))
        finished = len(self.engine.finished)
        self.engine.step(fail=chunk)
        self.dropped += before - len(list(self.engine.scheduler)) - (len(self.engine.finished) - finished)

    @precondition(lambda self: list(self.engine.scheduler))
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        """A kernel refused one of them, whose list of blocks may say anything: it is computed elsewhere."""
        victim = data.draw(st.sampled_from(list(self.engine.scheduler)))
        for blocks in (victim.prompt_blocks, victim.decode_blocks):
            if blocks and data.draw(st.booleans()):
                blocks[data.draw(st.integers(0, len(blocks) - 1))] = data.draw(st.integers(-2, self.engine.geometry.end_block + 2))
        self.engine.scheduler.disown(victim)
        self.dropped += 1

    @precondition(lambda self: list(self.engine.scheduler))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.scheduler.remove(data.draw(st.sampled_from(list(self.engine.scheduler))))
        self.dropped += 1

    @invariant()
    def books_balance(self) -> None:
        engine = self.engine
        engine.scheduler.check_integrity()
        assert engine.pool.used_blocks + engine.pool.kept_blocks + sum(map(engine.pool.free_blocks, Region)) == engine.geometry.total_blocks
        assert engine.scheduler.running <= engine.max_running
        assert all(sequence.overtaken <= order.MOST_OVERTAKEN for sequence in engine.scheduler)
        assert len(list(engine.scheduler)) + len(engine.finished) + self.dropped == self.submitted
        saved = {sequence.arrival: sequence.saved_blocks for sequence in engine.scheduler if sequence.saved_blocks}
        assert saved == {owner: len(blocks) for owner, blocks in engine.saved.items()}, "set aside for nobody, or forgotten"

    def teardown(self) -> None:
        """Whatever was left runs to its end: nothing waits for ever."""
        if not hasattr(self, "engine"):
            return
        turns = 0
        while list(self.engine.scheduler):
            assert self.engine.step(), "sequences live and nothing is done"
            turns += 1
            assert turns < 2_000, "no end in sight"
        self.engine.step()  # as the loop does after the last abort: what waits to be promoted is not kept waiting
        self.engine.scheduler.check_integrity()
        assert not self.engine.saved
        assert self.engine.pool.used_blocks == 0
        for sequence in self.engine.finished:
            assert sequence.answer_tokens == sequence.request.sampling.max_new_tokens


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_a_full_decode_region_preempts_the_youngest() -> None:
    """The oldest keeps going, the youngest computes its answer again later; both get all their tokens."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64)
    old, young = make_sequence(1, 3, 7), make_sequence(2, 3, 7)
    engine.scheduler.add(old)
    engine.scheduler.add(young)
    while engine.step():
        pass
    assert engine.finished == [old, young]
    assert engine.scheduler.preemptions > 0


def test_who_gave_way_comes_back_with_what_it_had() -> None:
    """Nothing of its answer is computed again: every prefill is of a prompt, and every token is decoded once."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64, swap_blocks=8)
    old, young = make_sequence(1, 3, 7), make_sequence(2, 3, 7)
    for sequence in (old, young):
        engine.scheduler.add(sequence)
    computed = 0
    while list(engine.scheduler):
        computed += sum(chunk.count for chunk in engine.scheduler.plan_prefill())
        engine.step()
    assert engine.finished == [old, young]
    assert engine.scheduler.swaps == engine.scheduler.preemptions > 0
    assert computed == old.prompt_tokens + young.prompt_tokens


def test_who_finds_no_room_to_be_set_aside_is_computed_again() -> None:
    """As without any."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64, swap_blocks=1)
    for arrival in (1, 2):
        engine.scheduler.add(make_sequence(arrival, 3, 7))
    while engine.step():
        pass
    assert len(engine.finished) == 2
    assert engine.scheduler.preemptions > engine.scheduler.swaps == 0


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """No part of a prompt is admitted; the next in line does not overtake it."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=4, decode_blocks=8), max_running=4, chunk_tokens=64)
    first, big, small = make_sequence(1, 6, 3), make_sequence(2, 8, 1), make_sequence(3, 1, 1)
    for sequence in (first, big, small):
        engine.scheduler.add(sequence)
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 2)
    assert big.stage is Stage.WAITING
    assert big.blocks == []
    while engine.step():
        pass
    assert engine.finished == [first, big, small]


def test_an_answer_begun_in_an_earlier_life_lies_where_it_lay() -> None:
    """The prompt is computed first and sealed, then the answer's tokens in the decode region; nothing is chosen twice."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=4, decode_blocks=6), max_running=2, chunk_tokens=8)
    begun = make_sequence(1, 14, 12, begun=9)
    engine.scheduler.add(begun)
    (first,) = engine.scheduler.plan_prefill()
    assert (first.start, first.count, first.completes, first.chooses) == (0, 8, False, False)
    engine._apply_moves()
    engine._prefill(first)
    (second,) = engine.scheduler.plan_prefill()
    assert (second.start, second.count, second.completes, second.chooses) == (8, 6, True, False)
    engine._prefill(second)
    assert (begun.stage, engine.scheduler.preemptions) == (Stage.WAITING, 0)
    while engine.step():
        pass
    assert engine.finished == [begun]
    assert begun.answer_tokens == 12
    assert engine.pool.used_blocks == 0


def test_decode_waits_for_one_chunk_at_most() -> None:
    """While a long prompt is prefilled in chunks, who decodes gets a token in every turn."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=40, decode_blocks=40), max_running=4, chunk_tokens=8)
    talker, long = make_sequence(1, 4, 50), make_sequence(2, 100, 1)
    engine.scheduler.add(talker)
    engine.step()
    engine.scheduler.add(long)
    turns = 0
    while long.stage is not Stage.FINISHED:
        before = talker.answer_tokens
        engine.step()
        turns += 1
        assert talker.answer_tokens == before + 1
    assert turns == 13  # ceil(100 / 8)


def test_one_step_shares_its_tokens_among_several_prompts() -> None:
    """Short prompts ride together instead of one a step."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=40, decode_blocks=40), max_running=4, chunk_tokens=10)
    for arrival, prompt in enumerate((4, 3, 9), 1):
        engine.scheduler.add(make_sequence(arrival, prompt, 2))
    chunks = engine.scheduler.plan_prefill()
    assert [(chunk.start, chunk.count, chunk.completes) for chunk in chunks] == [(0, 4, True), (0, 3, True), (0, 3, False)]


def test_a_prompt_that_was_computed_before_is_not_computed_again() -> None:
    """All its full blocks but the one with the last token are taken; two that share them hold them twice."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=12, decode_blocks=8), max_running=4, chunk_tokens=64)
    same = tuple(range(16))
    engine.scheduler.add(make_sequence(1, 16, 2, beginning=same))
    engine.step()
    second, third = make_sequence(2, 16, 2, beginning=same), make_sequence(3, 18, 2, beginning=same)
    engine.scheduler.add(second)
    engine.scheduler.add(third)
    chunks = engine.scheduler.plan_prefill()
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(12, 4), (16, 2)]
    assert second.prompt_blocks[:3] == third.prompt_blocks[:3]
    assert (second.cached_tokens, third.cached_tokens, engine.scheduler.cached_tokens) == (12, 16, 28)


def test_the_next_turn_of_a_conversation_finds_the_answer() -> None:
    """Prompt and answer so far, promoted when the answer was finished: only what is new is computed."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=12, decode_blocks=8), max_running=4, chunk_tokens=64)
    first = make_sequence(1, 6, 11)
    engine.scheduler.add(first)
    while engine.step():
        pass
    assert engine.pool.used_blocks == 0
    second = make_sequence(2, 20, 1, beginning=tuple(first.token_ids))
    engine.scheduler.add(second)
    (chunk,) = engine.scheduler.plan_prefill()
    assert (chunk.start, chunk.count) == (16, 4)  # 16 of 17 tokens: the last one was never an input


def test_what_is_only_kept_gives_way_the_oldest_first() -> None:
    """A prompt that needs all the room gets it; of two beginnings the one that was used last survives a smaller need."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=6, decode_blocks=8), max_running=4, chunk_tokens=64)
    old, new = tuple(range(100, 109)), tuple(range(200, 209))
    for arrival, beginning in enumerate((old, new, old), 1):
        engine.scheduler.add(make_sequence(arrival, 9, 1, beginning=beginning))
        while engine.step():
            pass
    assert engine.pool.kept_blocks == 4
    engine.scheduler.add(make_sequence(4, 12, 1))
    while engine.step():
        pass
    engine.scheduler.add(again := make_sequence(5, 9, 1, beginning=old))
    engine.scheduler.plan_prefill()
    assert again.cached_tokens == 8
    engine.scheduler.remove(again)
    engine.scheduler.add(whole := make_sequence(6, 24, 1))
    assert [chunk.count for chunk in engine.scheduler.plan_prefill()] == [24]
    assert whole.cached_tokens == 0
    assert engine.scheduler.cache.evictions >= 5


def test_an_answer_that_waits_to_be_promoted_gives_way_to_one_that_is_written() -> None:
    """Nobody is preempted, and nobody waits, for blocks that are held for a next turn that may never come."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=6), max_running=2, chunk_tokens=64)
    engine._promote = lambda: None  # type: ignore[method-assign]
    engine.scheduler.add(make_sequence(1, 2, 10))
    while engine.step():
        pass
    assert engine.pool.free_blocks(Region.DECODE) == 2
    engine.scheduler.add(make_sequence(2, 2, 12))
    while engine.step():
        pass
    assert len(engine.finished) == 2
    assert engine.scheduler.preemptions == 0
