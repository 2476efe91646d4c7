"""The lane over several engines."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.gateway.admission import Lane
from appliance.gateway.envelope import Refused
from appliance.gateway.memory import CardUse, Memory
from appliance.gateway.room import Space
from tests.unit.gateway.lane import enter, make_lane, settled, taken


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
