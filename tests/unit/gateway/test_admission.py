"""The lane: order, bounds, and the clock that stands still while it is closed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from appliance.gateway.admission import Lane
from appliance.gateway.envelope import Refused
from appliance.gateway.memory import CardUse, Memory
from appliance.gateway.room import Space
from appliance.gateway.schedule import BYPASSES_MAX, Ticket
from tests.fakes.scripted_appliance import eventually


def make_lane(capacity: int = 1, **given: Any) -> Lane:
    """An open lane with generous bounds."""
    memory = given.pop("memory", Memory(0))
    settings: dict[str, Any] = {"queue_size": 100, "queue_timeout_s": 60.0, "max_wait_s": 60.0, "new_memory": lambda: memory, **given}
    lane = Lane(refused_while_closed=lambda: Refused(503, "away", "the engine is away"), **settings)
    if capacity:
        lane.open(Space(capacity))
    return lane


def ticket(order: int, **given: Any) -> Ticket:
    """A request of one token that waits as long as it must."""
    return Ticket(order, f"req-{order}", **given)


async def taken(lane: Lane, order: int, *, returning: bool = False, **given: Any) -> Ticket:
    """A slot that is in use."""
    one = ticket(order, **given)
    await lane.acquire(one, returning=returning)
    return one


def enter(lane: Lane, order: int, *, returning: bool = False, **given: Any) -> asyncio.Task[Ticket]:
    """Ask for a slot in a task."""
    return asyncio.ensure_future(taken(lane, order, returning=returning, **given))


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


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


def full_card() -> Memory:
    """Over the red line: prompts from 2048 tokens on go in alone."""
    memory = Memory(0.9)
    memory.heard([CardUse("0000:01:00.0", 95, 100)])
    return memory


async def test_a_long_prompt_waits_for_memory_and_short_ones_do_not() -> None:
    """It goes in when the engine has run empty, and its answer opens the way for the others like it."""
    memory = full_card()
    lane = make_lane(4, memory=memory)
    inside = await taken(lane, 1)
    long, longer = enter(lane, 2, prompt_tokens=4000, tokens=4000), enter(lane, 3, prompt_tokens=5000, tokens=5000)
    short = await taken(lane, 4)
    await settled()
    assert (long.done(), longer.done(), memory.held_back["red_line"]) == (False, False, 2)
    for one in (inside, short):
        lane.release(one)
    await settled()
    assert (long.done(), longer.done()) == (True, False)
    beside = await taken(lane, 5)
    lane.release(await long, held_s=1.0)
    await settled()
    assert longer.done(), "what has been answered once is no danger"
    assert not memory.over
    for one in (beside, await longer):
        lane.release(one)


async def test_a_long_prompt_alone_that_fails_proves_nothing() -> None:
    """The next one waits as well."""
    memory = full_card()
    lane = make_lane(4, memory=memory)
    lane.release(await taken(lane, 1, prompt_tokens=4000, tokens=4000))
    assert memory.over


async def test_short_prompts_cannot_starve_one_that_waits_for_memory() -> None:
    """As with KV tokens: it is passed by so often, and then saved up for."""
    lane = make_lane(2, memory=full_card())
    inside = [await taken(lane, 1), await taken(lane, 2)]
    long = enter(lane, 3, prompt_tokens=4000, tokens=4000)
    await settled()
    passed = 0
    for order in range(4, 200):
        newcomer = enter(lane, order)
        await settled()
        lane.release(inside.pop(0))
        await settled()
        if long.done():
            break
        if newcomer.done():
            inside.append(await newcomer)
            passed += 1
    assert long.done()
    assert passed == BYPASSES_MAX


async def test_who_waits_for_memory_too_long_is_told_so() -> None:
    """503 with the card, its share, the line, and when to come again."""
    lane = make_lane(4, memory=full_card(), queue_timeout_s=0.05)
    inside = await taken(lane, 1)
    with pytest.raises(Refused) as caught:
        await taken(lane, 2, prompt_tokens=4000, tokens=4000)
    refused = caught.value
    assert (refused.status, refused.code) == (503, "memory_short")
    assert "the prompt has about 4000 tokens, and card 0000:01:00.0 has 95.0 % of its 100 B taken, above the red line of 90.0 %" in str(
        refused
    )
    assert refused.retry_after_s
    lane.release(inside)


def several(*spaces: Space | None, **given: Any) -> Lane:
    """A lane over so many engines, each with a memory of its own."""
    lane = make_lane(0, new_memory=lambda: Memory(0.9), **given)
    lane.open(*spaces)
    return lane


async def test_engines_share_one_queue_and_are_filled_evenly() -> None:
    """No slot stays empty while somebody waits, and a slot that becomes free goes to the next in the queue, wherever it is."""
    lane = several(Space(2), Space(2))
    inside = [await taken(lane, order) for order in range(1, 5)]
    assert sorted(one.replica for one in inside) == [0, 0, 1, 1]
    assert (lane.capacity, lane.in_use, [room.in_use for room in lane.rooms]) == (4, 4, [2, 2])
    first, second = enter(lane, 5), enter(lane, 6)
    await settled()
    left = inside.pop()
    lane.release(left)
    await settled()
    assert (first.done(), second.done()) == (True, False)
    assert (await first).replica == left.replica
    for one in inside:
        lane.release(one)
    await settled()
    assert second.done()


async def test_a_conversation_comes_back_to_its_engine_while_that_is_not_too_busy() -> None:
    """Its beginning lies there; but it does not wait behind others for that."""
    lane = several(Space(8), Space(8))
    homes = {}
    for conversation in range(1, 21):
        one = await taken(lane, conversation, conversation=conversation)
        homes[conversation] = one.replica
        lane.release(one)
    assert set(homes.values()) == {0, 1}
    for conversation, replica in homes.items():
        again = await taken(lane, 100 + conversation, conversation=conversation)
        assert again.replica == replica
        lane.release(again)
    crowd = [await taken(lane, 200 + number, conversation=1) for number in range(16)]
    loads = [room.in_use for room in lane.rooms]
    assert loads == [8, 8]
    early = [one.replica for one in crowd[:8]]
    assert early.count(homes[1]) in (5, 6)
    for one in crowd:
        lane.release(one)


async def test_an_engine_that_is_out_gets_nothing_and_queue_time_passes_while_another_is_open() -> None:
    """The lane is closed only when all are."""
    lane = several(Space(1), None, queue_timeout_s=0.05)
    inside = await taken(lane, 1)
    assert (inside.replica, lane.capacity, lane.is_open) == (0, 1, True)
    with pytest.raises(Refused) as caught:
        await taken(lane, 2)
    assert caught.value.code == "queue_timeout"
    waiting = enter(lane, 3)
    await settled()
    lane.open(Space(1), Space(1))
    await settled()
    assert (await waiting).replica == 1
    lane.close()
    held = enter(lane, 4)
    await settled()
    assert (lane.is_open, held.done(), lane.capacity) == (False, False, 2)
    lane.open(None, Space(2))
    assert (await held).replica == 1


async def test_whoever_lost_one_engine_goes_in_at_another_at_once() -> None:
    """In front of those who wait, and without the first one being back."""
    lane = several(Space(1), Space(1))
    inside = [await taken(lane, order) for order in (1, 2)]
    waiting = enter(lane, 3)
    await settled()
    dead, other = sorted(inside, key=lambda one: one.replica)
    lane.open(None, Space(1))
    lane.release(dead)
    returning = enter(lane, dead.order, returning=True)
    await settled()
    assert not returning.done()
    lane.release(other)
    await settled()
    assert (returning.done(), waiting.done(), (await returning).replica) == (True, False, 1)


async def test_a_long_prompt_goes_where_it_fits() -> None:
    """An engine on a safer rung takes shorter ones; while no other is there, its own refusal names the numbers."""
    lane = several(Space(8, longest_tokens=1000), Space(8, longest_tokens=4000))
    long = [await taken(lane, order, prompt_tokens=3000) for order in range(1, 9)]
    assert {one.replica for one in long} == {1}
    ninth = enter(lane, 9, prompt_tokens=3000)
    short = await taken(lane, 10, prompt_tokens=100)
    await settled()
    assert (ninth.done(), short.replica) == (False, 0)
    lane.open(Space(8, longest_tokens=1000), None)
    assert (await ninth).replica == 0


async def test_each_engine_has_its_own_pool_and_its_own_memory() -> None:
    """What does not fit the one goes to the other; a long prompt waits for memory only where each is short of it."""
    lane = several(Space(8, 1000), Space(8, 5000))
    first = [await taken(lane, order, tokens=900) for order in (1, 2, 3, 4)]
    assert [room.reserved_tokens for room in lane.rooms] == [900, 2700]
    for one in first:
        lane.release(one)
    lane.rooms[0].memory.heard([CardUse("0000:01:00.0", 95, 100)])
    inside = [await taken(lane, order, conversation=order) for order in range(5, 15)]
    assert {one.replica for one in inside} == {0, 1}
    long = await taken(lane, 20, prompt_tokens=4000)
    assert (long.replica, long.alone) == (1, False)
    lane.rooms[1].memory.heard([CardUse("0000:02:00.0", 96, 100)])
    waiting = enter(lane, 21, prompt_tokens=4000)
    await settled()
    assert (waiting.done(), sum(sum(room.memory.held_back.values()) for room in lane.rooms)) == (False, 1)
    for one in (one for one in inside if one.replica == 0):
        lane.release(one)
    alone = await waiting
    assert (alone.replica, alone.alone) == (0, True)
    lane.release(alone, held_s=1.0)
    assert [room.memory.over for room in lane.rooms] == [False, True], "only this one has proved it"


async def test_an_engine_that_is_not_there_any_more_takes_nobody() -> None:
    """A lane over two becomes one over one; who is still with the other gives its slot back as ever."""
    lane = several(Space(1), Space(1))
    inside = [await taken(lane, order) for order in (1, 2)]
    lane.open(Space(2))
    other = await taken(lane, 3)
    assert (other.replica, lane.capacity) == (0, 2)
    for one in (*inside, other):
        lane.release(one)
    assert (lane.in_use, lane.reserved_tokens) == (0, 0)
