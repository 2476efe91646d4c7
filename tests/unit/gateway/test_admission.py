"""The lane: order, bounds, and the clock that stands still while it is closed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from appliance.gateway.admission import Lane
from appliance.gateway.envelope import Refused
from tests.fakes.scripted_appliance import eventually


def make_lane(capacity: int = 1, **given: Any) -> Lane:
    """An open lane with generous bounds."""
    settings: dict[str, Any] = {"queue_size": 100, "queue_timeout_s": 60.0, "max_wait_s": 60.0, **given}
    lane = Lane(refused_while_closed=lambda: Refused(503, "away", "the engine is away"), **settings)
    if capacity:
        lane.open(capacity)
    return lane


def enter(lane: Lane, order: int, *, returning: bool = False) -> asyncio.Task[None]:
    """Ask for a slot in a task."""
    return asyncio.ensure_future(lane.acquire(order, f"req-{order}", returning=returning))


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_go_in_the_order_of_arrival() -> None:
    """First come, first served."""
    lane = make_lane(1)
    await lane.acquire(1, "req-1")
    waiting = [enter(lane, order) for order in (2, 3, 4)]
    await settled()
    for task in waiting:
        assert not task.done()
        lane.release()
        await settled()
        assert task.done()
    assert (lane.in_use, lane.queue_length) == (1, 0)


async def test_a_closed_lane_lets_nobody_in_and_opens_for_all_it_has_room_for() -> None:
    """Arrivals wait for the first `open`."""
    lane = make_lane(0)
    waiting = [enter(lane, order) for order in range(5)]
    await settled()
    assert not any(task.done() for task in waiting)
    lane.open(3)
    await settled()
    assert [task.done() for task in waiting] == [True, True, True, False, False]


async def test_those_who_return_go_before_those_who_have_not_been_in() -> None:
    """In the order in which they arrived first, whatever the order of their losses."""
    lane = make_lane(0)
    fresh = enter(lane, 1)
    await settled()
    second, first = enter(lane, 9, returning=True), enter(lane, 4, returning=True)
    await settled()
    done: list[str] = []
    for name, task in (("fresh", fresh), ("second", second), ("first", first)):
        task.add_done_callback(lambda _, name=name: done.append(name))
    lane.open(1)
    for _ in range(2):
        await settled()
        lane.release()
    await settled()
    assert done == ["first", "second", "fresh"]


async def test_a_smaller_capacity_holds_back_until_enough_have_left() -> None:
    """Nobody is thrown out, nobody goes in."""
    lane = make_lane(4)
    for order in range(4):
        await lane.acquire(order, "req")
    lane.open(2)
    waiting = enter(lane, 9)
    for _ in range(2):
        lane.release()
        await settled()
        assert not waiting.done()
    lane.release()
    await settled()
    assert waiting.done()


async def test_leaving_the_queue_and_leaving_just_after_being_let_in_lose_no_slot() -> None:
    """Cancelled before the grant, and between the grant and the task's next step."""
    lane = make_lane(1)
    await lane.acquire(1, "req-1")
    before, between, last = enter(lane, 2), enter(lane, 3), enter(lane, 4)
    await settled()
    before.cancel()
    await settled()
    assert lane.queue_length == 2
    lane.release()
    between.cancel()
    await settled()
    assert between.cancelled()
    assert last.done()
    assert not last.cancelled()
    assert lane.in_use == 1


async def test_random_traffic_never_exceeds_the_slots_and_leaves_none_taken() -> None:
    """Acquire, release, cancel, close, open, resize in any order."""
    generator = random.Random(3)
    lane = make_lane(3, queue_size=1000)
    inside = 0

    async def visit(order: int) -> None:
        nonlocal inside
        returning = False
        for _ in range(generator.randint(1, 3)):
            await lane.acquire(order, f"req-{order}", returning=returning)
            inside += 1
            try:
                assert inside <= lane.in_use <= 5  # let in is counted before the task has run
                await asyncio.sleep(generator.random() * 0.002)
            finally:
                inside -= 1
                lane.release()
            returning = True

    tasks = []
    for order in range(400):
        tasks.append(asyncio.ensure_future(visit(order)))
        if generator.random() < 0.2:
            generator.choice(tasks).cancel()
        if generator.random() < 0.1:
            lane.close()
            lane.open(generator.randint(1, 5))
        if order % 10 == 0:
            await asyncio.sleep(0.002)
    lane.open(3)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert (lane.in_use, lane.queue_length) == (0, 0)


async def test_a_full_queue_refuses_with_its_numbers() -> None:
    """429 naming what runs, what waits and the limit; those who return are never refused for it."""
    lane = make_lane(1, queue_size=1)
    await lane.acquire(1, "req-1")
    waiting = enter(lane, 2)
    await settled()
    with pytest.raises(Refused, match=r"1 requests run \(1 slots\) and 1 wait, which is the limit of 1") as refused:
        await lane.acquire(3, "req-3")
    assert refused.value.status == 429
    returning = enter(lane, 0, returning=True)
    await settled()
    assert lane.queue_length == 2
    waiting.cancel()
    returning.cancel()


async def test_a_full_queue_of_a_closed_lane_says_why_it_is_closed() -> None:
    """The engine is the reason, not the queue."""
    lane = make_lane(0, queue_size=0)
    with pytest.raises(Refused, match="the engine is away"):
        await lane.acquire(1, "req-1")


async def test_waiting_is_bounded_while_open() -> None:
    """429 after queue_timeout_s, for each from its own arrival."""
    lane = make_lane(1, queue_timeout_s=0.05)
    await lane.acquire(1, "req-1")
    first = enter(lane, 2)
    await asyncio.sleep(0.03)
    second = enter(lane, 3)
    with pytest.raises(Refused, match=r"within 0\.05 s"):
        await first
    assert not second.done()
    with pytest.raises(Refused, match=r"within 0\.05 s"):
        await second
    assert lane.queue_length == 0


async def test_waiting_is_bounded_otherwise_while_closed() -> None:
    """max_wait_s from the closing or the arrival, whichever is later; the queue's own time stands still meanwhile."""
    lane = make_lane(1, queue_timeout_s=0.08, max_wait_s=0.5)
    await lane.acquire(1, "req-1")
    patient = enter(lane, 2)
    await settled()
    lane.close()
    await asyncio.sleep(0.2)
    assert not patient.done()
    lane.open(1)
    lane.release()
    await patient
    lane.close()
    held = enter(lane, 3)
    with pytest.raises(Refused, match="the engine is away"):
        await held


async def test_everybody_can_be_refused_at_once() -> None:
    """Each with an error of its own, so that no traceback grows in a shared one."""
    lane = make_lane(0)
    waiting = [enter(lane, 1), enter(lane, 2, returning=True)]
    await settled()
    lane.refuse_all(lambda: Refused(503, "parked", "a person is needed"))
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in errors] == ["a person is needed"] * 2
    assert errors[0] is not errors[1]
    assert lane.queue_length == 0


async def test_the_estimate_follows_what_was_measured() -> None:
    """Nothing before the first answer; then position over slots times the mean."""
    lane = make_lane(2)
    assert lane.estimated_wait_s(0) is None
    await lane.acquire(1, "req-1")
    lane.release(10.0)
    assert lane.estimated_wait_s(0) == pytest.approx(5.0)
    assert lane.estimated_wait_s(3) == pytest.approx(20.0)
    lane.close()
    assert lane.estimated_wait_s(0) is None


async def test_the_queue_can_be_looked_at_in_order() -> None:
    """Returning first, then arrivals, without those who were just let in."""
    lane = make_lane(0)
    tasks = [enter(lane, 5), enter(lane, 6), enter(lane, 2, returning=True)]
    await eventually(lambda: lane.queue_length == 3, "three wait")
    assert [waiter.order for waiter in lane.waiting()] == [2, 5, 6]
    for task in tasks:
        task.cancel()
