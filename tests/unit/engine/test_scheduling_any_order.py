"""The scheduler and the pool against a model of the cache, whatever comes in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.engine import order
from appliance.engine.block_pool import PoolGeometry, Region
from tests.unit.engine.model_runner import Engine, make_sequence


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
        """A kernel refused some of them, whose lists of blocks may say anything: they are computed elsewhere."""
        living = list(self.engine.scheduler)
        victims = data.draw(st.lists(st.sampled_from(living), min_size=1, max_size=3, unique_by=id))
        for blocks in (blocks for victim in victims for blocks in (victim.prompt_blocks, victim.decode_blocks)):
            if blocks and data.draw(st.booleans()):
                blocks[data.draw(st.integers(0, len(blocks) - 1))] = data.draw(st.integers(-2, self.engine.geometry.end_block + 2))
        self.engine.scheduler.disown(victims)
        self.dropped += len(victims)

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
