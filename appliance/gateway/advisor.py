"""What applianced knows and admission needs: the cards' memory, the plan of the rung in force, lengths that go with crashes.
With several engines, of each.

Asked for once a second while there are cards, seldom where there are none; whoever does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.gateway.doors import Doors
from appliance.gateway.gate import Life
from appliance.gateway.memory import CardUse, PrefillPlan
from appliance.gateway.resume import LifeName
from appliance.gateway.room import Room

log = logging.getLogger("gateway.advisor")

ASK_S = 1.0
WITHOUT_CARDS_S = 3.0
FLIGHT_S = 5.0
"""Of the flight recorder, which has a sample a second, the last one of these."""
DEADLINE_S = 2.0
Json = dict[str, Any]


@dataclass(slots=True)
class _Asked:
    """Of one engine: the life whose plan is known, whether it has cards, and when it was asked about last."""

    life: LifeName | None = None
    has_cards: bool = False
    asked_s: float = -WITHOUT_CARDS_S


class Advisor:
    """Asks; `advise` is told of lengths, and `changed` called where those who wait may have something of it."""

    def __init__(
        self, control: AsyncControl, doors: Doors, rooms: Sequence[Room], advise: Callable[[object], None], changed: Callable[[], None]
    ) -> None:
        """`rooms`: of the engines, by index; there may be more of them later."""
        self._control = control
        self._doors = doors
        self._rooms = rooms
        self._advise = advise
        self._changed = changed
        self._asked: defaultdict[int, _Asked] = defaultdict(_Asked)

    async def keep(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            for life in [gate.life for gate in self._doors.gates]:
                if life is None or life.index >= len(self._rooms):
                    continue
                asked, now_s = self._asked[life.index], loop.time()
                new = life.name != asked.life
                if new or now_s - asked.asked_s >= (ASK_S if asked.has_cards else WITHOUT_CARDS_S):
                    asked.asked_s = now_s
                    await self._ask_in_time(life, new=new)
            await self._doors.news(ASK_S)

    def close(self) -> None:
        """Give up what is under way."""
        self._control.close()

    async def _ask_in_time(self, life: Life, *, new: bool) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._ask(life, new=new)
        except (ApplianceError, TimeoutError) as error:
            log.debug("applianced's advice: %s", error)

    async def _ask(self, life: Life, *, new: bool) -> None:
        memory, asked = self._rooms[life.index].memory, self._asked[life.index]
        if new:
            memory.new_life()
            status = await self._control.ask("status")
            self._advise(status.get("fused_lengths"))
            own = status if life.replica is None else replica_of(status, life.replica)
            if own.get("generation") == life.generation:
                memory.planned(plan_of(own.get("rung")))
                asked.life = life.name
        which = {} if life.replica is None else {"replica": life.replica}
        flight = await self._control.ask("flight", since_s=time.time() - FLIGHT_S, **which)
        cards = list(cards_of(flight.get("cards")))
        asked.has_cards = bool(cards)
        if memory.heard(cards) or new:
            if memory.over:
                log.warning("%s", memory.sentence)
            self._changed()


def replica_of(status: Json, index: int) -> Json:
    """What applianced's status says of one of several engines; empty where it says nothing."""
    each = status.get("replicas")
    own = each[index] if isinstance(each, list) and index < len(each) else None
    return own if isinstance(own, dict) else {}


def cards_of(cards: object) -> Iterator[CardUse]:
    """The last sample of each card that has one."""
    for card in cards if isinstance(cards, list) else []:
        used, total = (card.get("used_bytes"), card.get("total_bytes")) if isinstance(card, dict) else (None, None)
        if isinstance(used, list) and used and isinstance(used[-1], int) and isinstance(total, int) and total > 0:
            yield CardUse(str(card.get("address")), used[-1], total)


def plan_of(rung: object) -> PrefillPlan | None:
    """Of the rung that is in force, where there is arithmetic behind it."""
    plan = rung.get("plan") if isinstance(rung, dict) else None
    if not isinstance(rung, dict) or not isinstance(plan, dict):
        return None
    headroom, peak, chunk = plan.get("headroom_bytes"), plan.get("activation_peak_bytes"), rung.get("prefill_chunk_tokens")
    if not isinstance(headroom, int) or not isinstance(peak, int) or not isinstance(chunk, int) or peak <= 0:
        return None
    return PrefillPlan(headroom, peak, max(0, chunk))
