"""The lane over the red line: long prompts wait for memory."""

from __future__ import annotations

import pytest

from appliance.gateway.envelope import Refused
from appliance.gateway.memory import CardUse, Memory
from appliance.gateway.schedule import BYPASSES_MAX
from tests.unit.gateway.lane import enter, make_lane, settled, taken


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
