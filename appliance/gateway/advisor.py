"""What applianced knows and admission needs: the cards' memory, the plan of the rung in force, lengths that go with crashes.

Asked for once a second while there are cards, seldom where there are none; whoever does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.gateway.gate import Gate
from appliance.gateway.memory import CardUse, Memory, PrefillPlan

log = logging.getLogger("gateway.advisor")

ASK_S = 1.0
WITHOUT_CARDS_S = 3.0
FLIGHT_S = 5.0
"""Of the flight recorder, which has a sample a second, the last one of these."""
DEADLINE_S = 2.0
Json = dict[str, Any]


class Advisor:
    """Asks; `advise` is told of lengths, and `changed` called where those who wait may have something of it."""

    def __init__(
        self, control: AsyncControl, gate: Gate, memory: Memory, advise: Callable[[object], None], changed: Callable[[], None]
    ) -> None:
        self._control = control
        self._gate = gate
        self._memory = memory
        self._advise = advise
        self._changed = changed
        self._generation: int | None = None
        self._has_cards = False
        self._asked_s = -WITHOUT_CARDS_S

    async def keep(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            life, pause_s = self._gate.life, ASK_S if self._has_cards else WITHOUT_CARDS_S
            new = life is not None and life.generation != self._generation
            if life is not None and (new or loop.time() - self._asked_s >= pause_s):
                self._asked_s = loop.time()
                try:
                    async with asyncio.timeout(DEADLINE_S):
                        await self._ask(life.generation, new=new)
                except (ApplianceError, TimeoutError) as error:
                    log.debug("applianced's advice: %s", error)
            await self._gate.news(ASK_S)

    def close(self) -> None:
        """Give up what is under way."""
        self._control.close()

    async def _ask(self, generation: int, *, new: bool) -> None:
        if new:
            self._memory.new_life()
            status = await self._control.ask("status")
            self._advise(status.get("fused_lengths"))
            if status.get("generation") == generation:
                self._memory.planned(plan_of(status.get("rung")))
                self._generation = generation
        flight = await self._control.ask("flight", since_s=time.time() - FLIGHT_S)
        cards = list(cards_of(flight.get("cards")))
        self._has_cards = bool(cards)
        if self._memory.heard(cards) or new:
            if self._memory.over:
                log.warning("%s", self._memory.sentence)
            self._changed()


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
