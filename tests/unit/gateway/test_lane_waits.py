"""The lane: a wait is bounded, estimated, and stands still while the lane is closed."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway.envelope import Refused
from appliance.gateway.room import Space
from tests.fakes.scripted_appliance import eventually
from tests.unit.gateway.lane import enter, make_lane, settled, taken


async def test_a_full_queue_refuses_with_its_numbers() -> None:
    """429 naming what runs, what waits and the limit; those who return are never refused for it."""
    lane = make_lane(1, queue_size=1)
    await taken(lane, 1)
    waiting = enter(lane, 2)
    await settled()
    with pytest.raises(Refused, match=r"1 requests run \(1 slots\) and 1 wait, which is the limit of 1") as refused:
        await taken(lane, 3)
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
        await taken(lane, 1)


async def test_waiting_is_bounded_while_open() -> None:
    """429 after queue_timeout_s, for each from its own arrival."""
    lane = make_lane(1, queue_timeout_s=0.05)
    await taken(lane, 1)
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
    inside = await taken(lane, 1)
    patient = enter(lane, 2)
    await settled()
    lane.close()
    await asyncio.sleep(0.2)
    assert not patient.done()
    lane.open(Space(1))
    lane.release(inside)
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
    lane.release(await taken(lane, 1), 10.0)
    assert lane.estimated_wait_s(0) == pytest.approx(5.0)
    assert lane.estimated_wait_s(3) == pytest.approx(20.0)
    lane.close()
    assert lane.estimated_wait_s(0) is None


async def test_the_queue_can_be_looked_at_in_order() -> None:
    """Returning first, then arrivals, without those who were just let in."""
    lane = make_lane(0)
    tasks = [enter(lane, 5), enter(lane, 6), enter(lane, 2, returning=True)]
    await eventually(lambda: lane.queue_length == 3, "three wait")
    assert [waiter.ticket.order for waiter in lane.waiting()] == [2, 5, 6]
    for task in tasks:
        task.cancel()


async def test_before_the_first_answer_the_one_under_way_is_the_estimate() -> None:
    """Too little, but not nothing."""
    lane = make_lane(1)
    await taken(lane, 1)
    await asyncio.sleep(0.05)
    assert lane.estimated_wait_s(1) >= 0.1


async def test_who_cannot_be_in_time_is_refused_before_it_waits() -> None:
    """With what it would have to wait; who can be in time waits."""
    lane = make_lane(1)
    lane.release(await taken(lane, 0), 10.0)
    await taken(lane, 1)
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(Refused, match=r"in about 10\.0 s \(0 go before it\), and its client waits [56]\.\d s") as refused:
        await taken(lane, 2, due_s=now_s + 6)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "deadline_unmeetable", 10.0)
    patient = enter(lane, 3, due_s=now_s + 60)
    await settled()
    assert lane.queue_length == 1
    patient.cancel()


async def test_a_wait_ends_with_its_client_s_patience() -> None:
    """Where nothing was known when it came."""
    lane = make_lane(1)
    inside = await taken(lane, 1)
    hurried = enter(lane, 2, due_s=asyncio.get_running_loop().time() + 0.05)
    with pytest.raises(Refused, match=r"no slot became free within \d") as refused:
        await hurried
    assert refused.value.code == "queue_timeout"
    assert lane.queue_length == 0
    lane.release(inside)
    assert lane.in_use == 0
