"""The lane: order, slots, the pool and the keys' shares."""

from __future__ import annotations

import asyncio
import random

import pytest

from appliance.gateway.envelope import Refused
from appliance.gateway.room import Space
from appliance.gateway.schedule import BYPASSES_MAX
from tests.unit.gateway.lane import enter, make_lane, settled, taken, ticket


async def test_slots_go_in_the_order_of_arrival() -> None:
    """First come, first served."""
    lane = make_lane(1)
    inside = await taken(lane, 1)
    waiting = [enter(lane, order) for order in (2, 3, 4)]
    await settled()
    for task in waiting:
        assert not task.done()
        lane.release(inside)
        inside = await task
    assert (lane.in_use, lane.queue_length) == (1, 0)


async def test_a_closed_lane_lets_nobody_in_and_opens_for_all_it_has_room_for() -> None:
    """Arrivals wait for the first `open`."""
    lane = make_lane(0)
    waiting = [enter(lane, order) for order in range(5)]
    await settled()
    assert not any(task.done() for task in waiting)
    lane.open(Space(3))
    await settled()
    assert [task.done() for task in waiting] == [True, True, True, False, False]


async def test_those_who_return_go_before_those_who_have_not_been_in() -> None:
    """In the order in which they arrived first, whatever the order of their losses."""
    lane = make_lane(0)
    fresh = enter(lane, 1)
    await settled()
    second, first = enter(lane, 9, returning=True), enter(lane, 4, returning=True)
    await settled()
    lane.open(Space(1))
    for task, rest in ((first, (second, fresh)), (second, (fresh,)), (fresh, ())):
        lane.release(await task)
        assert not any(other.done() for other in rest)


async def test_a_smaller_capacity_holds_back_until_enough_have_left() -> None:
    """Nobody is thrown out, nobody goes in."""
    lane = make_lane(4)
    inside = [await taken(lane, order) for order in range(4)]
    lane.open(Space(2))
    waiting = enter(lane, 9)
    for _ in range(2):
        lane.release(inside.pop())
        await settled()
        assert not waiting.done()
    lane.release(inside.pop())
    await settled()
    assert waiting.done()


async def test_leaving_the_queue_and_leaving_just_after_being_let_in_lose_no_slot() -> None:
    """Cancelled before the grant, and between the grant and the task's next step."""
    lane = make_lane(1)
    inside = await taken(lane, 1)
    before, between, last = enter(lane, 2), enter(lane, 3), enter(lane, 4)
    await settled()
    before.cancel()
    await settled()
    assert lane.queue_length == 2
    lane.release(inside)
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
        one = ticket(order, flow=generator.choice("abc"), tokens=generator.randint(1, 9000), level=generator.randint(0, 2))
        for _ in range(generator.randint(1, 3)):
            await lane.acquire(one, returning=returning)
            inside += 1
            try:
                assert inside <= lane.in_use <= 5  # let in is counted before the task has run
                await asyncio.sleep(generator.random() * 0.002)
            finally:
                inside -= 1
                lane.release(one, generator.choice([None, 0.001]))
            returning = True

    tasks = []
    for order in range(400):
        tasks.append(asyncio.ensure_future(visit(order)))
        if generator.random() < 0.2:
            generator.choice(tasks).cancel()
        if generator.random() < 0.1:
            lane.close()
            lane.open(Space(generator.randint(1, 5), generator.choice([0, 10_000])))
        if order % 10 == 0:
            await asyncio.sleep(0.002)
    lane.open(Space(3))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert (lane.in_use, lane.queue_length, lane.reserved_tokens) == (0, 0, 0)


async def test_the_pool_is_not_promised_twice() -> None:
    """Prompts and answers in flight fit the KV pool together; one alone may try even if it does not fit."""
    lane = make_lane(0)
    lane.open(Space(8, 1000))
    first = await taken(lane, 1, tokens=600)
    second = enter(lane, 2, tokens=600)
    await settled()
    assert (second.done(), lane.in_use, lane.reserved_tokens) == (False, 1, 600)
    lane.release(first)
    lane.release(await second)
    huge = await taken(lane, 3, tokens=5000)
    lane.release(huge)
    assert lane.reserved_tokens == 0


async def test_small_ones_pass_a_large_one_a_bounded_number_of_times() -> None:
    """What is free is used; then it is saved up for the one that waits."""
    lane = make_lane(0)
    lane.open(Space(100, 1000))
    holding = await taken(lane, 0, tokens=500)
    large = enter(lane, 1, tokens=900)
    await settled()
    small = [enter(lane, order, tokens=10) for order in range(2, 60)]
    await settled()
    inside = [task for task in small if task.done()]
    assert len(inside) == BYPASSES_MAX
    lane.release(holding)
    for task in inside:
        lane.release(task.result())
    await settled()
    assert large.done()
    lane.release(large.result())
    await settled()
    assert all(task.done() for task in small)


async def test_a_large_one_that_leaves_gives_way_to_those_it_held_up() -> None:
    """The pool is not saved up for a client that is gone."""
    lane = make_lane(0)
    lane.open(Space(100, 1000))
    await taken(lane, 0, tokens=500)
    large = enter(lane, 1, tokens=900)
    await settled()
    small = [enter(lane, order, tokens=10) for order in range(2, 30)]
    await settled()
    large.cancel()
    await settled()
    assert all(task.done() for task in small)


async def test_a_key_has_no_more_than_its_own_slots() -> None:
    """Nobody else waits for that."""
    lane = make_lane(4)
    first = await taken(lane, 1, flow="a", max_concurrent=1)
    second = enter(lane, 2, flow="a", max_concurrent=1)
    await settled()
    other = await taken(lane, 3, flow="b")
    assert not second.done()
    lane.release(other)
    await settled()
    assert not second.done()
    lane.release(first)
    await second


async def test_a_burst_of_one_flow_does_not_fill_the_queue_for_another() -> None:
    """The newcomer takes the place of the flow with the most waiting; nobody is refused for those who ask for less."""
    lane = make_lane(1, queue_size=10)
    inside = await taken(lane, 1, flow="a")
    burst = [enter(lane, order, flow="a") for order in range(2, 12)]
    await settled()
    other = enter(lane, 50, flow="b")
    await settled()
    assert not other.done()
    with pytest.raises(Refused, match="which is the limit of 10"):
        await burst[-1]
    with pytest.raises(Refused, match="limit of 10"):
        await taken(lane, 51, flow="a")
    lane.release(inside)
    await other
    assert not any(task.done() for task in burst[:-1])


async def test_a_key_may_have_so_many_waiting() -> None:
    """429 with the key's own numbers."""
    lane = make_lane(1)
    await taken(lane, 1)
    waiting = [enter(lane, order, flow="a", max_queued=2) for order in (2, 3)]
    await settled()
    with pytest.raises(Refused, match=r"2 requests of the key 'a' wait, which is its limit of 2") as refused:
        await taken(lane, 4, flow="a", max_queued=2)
    assert (refused.value.status, refused.value.code) == (429, "key_queue_full")
    assert lane.queue_length == 2
    for task in waiting:
        task.cancel()
