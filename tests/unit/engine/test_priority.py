"""Who is served before whom: by priority, then by arrival, and nobody for ever. Over the model of the cache of model_runner.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine import order
from appliance.engine.block_pool import PoolGeometry
from tests.unit.engine.model_runner import Engine, make_sequence
from tests.unit.engine.test_scheduling_any_order import SchedulerMachine


class ImpatientMachine(SchedulerMachine):
    """The same where the second overtaking is one too many: order and preemption change while sequences live."""

    def __init__(self) -> None:
        super().__init__()
        self._most, order.MOST_OVERTAKEN = order.MOST_OVERTAKEN, 2

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            order.MOST_OVERTAKEN = self._most


ImpatientMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestImpatientMachine = ImpatientMachine.TestCase


def run_all(engine: Engine) -> list[int]:
    """To the end; who was admitted, in order, each once."""
    admitted: list[int] = []
    while list(engine.scheduler):
        engine.scheduler.plan_prefill()
        admitted += [one.arrival for one in engine.scheduler if one.prompt_blocks and one.arrival not in admitted]
        assert engine.step(), "sequences live and nothing is done"
    return admitted


@given(st.lists(st.sampled_from((-5, 0, 0, 3)), max_size=12))
@settings(deadline=None)
def test_the_lower_priority_goes_first_and_equal_ones_as_they_came(priorities: list[int]) -> None:
    """One at a time: the order of admission is that of priority, then of arrival."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=9, decode_blocks=9), max_running=1, chunk_tokens=64)
    for arrival, priority in enumerate(priorities, 1):
        engine.scheduler.add(make_sequence(arrival, 5, 2, priority=priority))
    wanted = sorted(range(1, len(priorities) + 1), key=lambda arrival: (priorities[arrival - 1], arrival))
    assert run_all(engine) == wanted


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_is_overtaken_more_often_than_the_bound(data: st.DataObject) -> None:
    """Requests keep coming, of any priority and size, into a pool of any size: before each one's admission so many younger ones at most
    are admitted, beside those that gave way to others."""
    most = data.draw(st.integers(0, 4))
    before, order.MOST_OVERTAKEN = order.MOST_OVERTAKEN, most
    try:
        engine = Engine(PoolGeometry(2, data.draw(st.integers(3, 9)), data.draw(st.integers(4, 9))), data.draw(st.integers(1, 3)), 8, 100)
        waiting: dict[int, int] = {}
        for arrival in range(1, 40):
            priority, prompt, answer = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
            engine.scheduler.add(make_sequence(arrival, prompt, answer, priority=priority))
            waiting[arrival] = 0
            engine.step()
            for one in [one for one in waiting if not _waits(engine, one)]:
                del waiting[one]
                for older in (other for other in waiting if other < one):
                    waiting[older] += 1
            assert all(times <= most for times in waiting.values())
        run_all(engine)
        assert len(engine.finished) == 39
    finally:
        order.MOST_OVERTAKEN = before


def _waits(engine: Engine, arrival: int) -> bool:
    """It was never admitted: it has no block of a prompt."""
    return any(one.arrival == arrival and not one.prompt_blocks for one in engine.scheduler)


def test_a_flood_of_urgent_requests_leaves_a_share_to_the_patient() -> None:
    """An urgent request comes at every turn for ever: the patient one is admitted behind 32 of them."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=9, decode_blocks=9), max_running=1, chunk_tokens=64)
    engine.scheduler.add(make_sequence(1, 5, 2, priority=0))
    engine.step()
    engine.scheduler.add(patient := make_sequence(2, 5, 2, priority=1_000_000))
    for arrival in range(3, 200):
        engine.scheduler.add(make_sequence(arrival, 5, 2, priority=-1_000_000))
        engine.step()
        if patient in engine.finished:
            break
    assert engine.finished.index(patient) == 1 + order.MOST_OVERTAKEN


def test_who_has_the_higher_priority_number_gives_way_although_it_is_older() -> None:
    """And comes back when there is room, with all its tokens."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64)
    patient, urgent = make_sequence(1, 3, 7, priority=1), make_sequence(2, 3, 7)
    for sequence in (patient, urgent):
        engine.scheduler.add(sequence)
    run_all(engine)
    assert engine.finished == [urgent, patient]
    assert patient.overtaken > 0


def test_an_urgent_prompt_is_computed_before_what_is_left_of_a_patient_one() -> None:
    """A long prompt in its chunks does not hold it up."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=40, decode_blocks=8), max_running=2, chunk_tokens=8)
    engine.scheduler.add(patient := make_sequence(1, 60, 1, priority=1))
    engine.step()
    engine.scheduler.add(urgent := make_sequence(2, 6, 1))
    assert [(chunk.sequence, chunk.count) for chunk in engine.scheduler.plan_prefill()] == [(urgent, 6), (patient, 2)]


def test_who_gave_way_comes_back_where_the_first_waits_for_the_room_of_its_prompt() -> None:
    """Otherwise both would wait for ever."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=4, decode_blocks=4), max_running=2, chunk_tokens=64)
    patient, urgent, large = make_sequence(1, 4, 8, priority=5), make_sequence(2, 4, 7), make_sequence(3, 8, 1)
    engine.scheduler.add(patient)
    engine.scheduler.add(urgent)
    engine.step()
    engine.scheduler.add(large)
    run_all(engine)
    assert engine.finished == [urgent, patient, large]
    assert engine.scheduler.preemptions > 0
