"""A lane to test, and those who ask it for a slot."""

from __future__ import annotations

import asyncio
from typing import Any

from appliance.gateway.admission import Lane
from appliance.gateway.envelope import Refused
from appliance.gateway.memory import Memory
from appliance.gateway.room import Space
from appliance.gateway.schedule import Ticket


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
