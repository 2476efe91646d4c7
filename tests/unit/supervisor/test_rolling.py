"""One engine after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from appliance.control.server import PublicationBoard
from appliance.core.errors import ControlError
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.supervisor.rolling import RollingRestart, order
from appliance.supervisor.summing import summed
from tests.unit.supervisor.test_summing import CARDS, publication


class Engines:
    """A board of engines that are asked by the test's hand."""

    def __init__(self, *states: EngineState) -> None:
        self.each = [publication(state, 1, place) for place, state in enumerate(states)]
        self.board = PublicationBoard(self._sum())
        self.asked: list[int] = []
        self.refused: set[int] = set()
        self.rolling = RollingRestart(self.board, CARDS[: len(states)])

    def _sum(self) -> Publication:
        return summed(self.each, CARDS[: len(self.each)])

    def asks(self) -> list[Callable[[], Awaitable[object]]]:
        """One for each."""

        def ask(place: int) -> Callable[[], Awaitable[object]]:
            async def asked() -> None:
                self.asked.append(place)
                if place in self.refused:
                    raise ControlError("not now")
                self.become(place, EngineState.DRAINING)

            return asked

        return [ask(place) for place in range(len(self.each))]

    def become(self, place: int, state: EngineState, lives: int = 0) -> None:
        """Post it."""
        self.each[place] = replace(publication(state, self.each[place].generation + lives, place))
        self.board.post(self._sum())


async def turns() -> None:
    """What is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_next_one_waits_for_the_one_before() -> None:
    """It answers again as a later life, not before."""
    engines = Engines(EngineState.SERVING, EngineState.SERVING)
    engines.rolling.begin(engines.asks())
    await turns()
    for state in (EngineState.BACKOFF, EngineState.STARTING, EngineState.PROVING):
        engines.become(0, state)
        await turns()
        assert engines.asked == [0]
    engines.become(0, EngineState.SERVING, lives=1)
    await turns()
    assert engines.asked == [0, 1]
    assert engines.rolling.under_way
    engines.become(1, EngineState.DEGRADED, lives=1)
    await turns()
    assert not engines.rolling.under_way


async def test_one_that_does_not_come_back_spares_the_others() -> None:
    """What is wrong with the new setting has cost one engine."""
    engines = Engines(EngineState.SERVING, EngineState.SERVING)
    engines.rolling.begin(engines.asks())
    await turns()
    engines.become(0, EngineState.PARKED, lives=1)
    await turns()
    assert engines.asked == [0]
    assert not engines.rolling.under_way


async def test_those_that_serve_nobody_come_first_and_hold_up_nobody() -> None:
    """One was parked already and parks again; one cannot be restarted now; then comes the one that serves."""
    engines = Engines(EngineState.SERVING, EngineState.PARKED, EngineState.PLANNING)
    engines.refused = {2}
    assert order(engines.each) == [1, 2, 0]
    engines.rolling.begin(engines.asks())
    await turns()
    engines.become(1, EngineState.PARKED)
    await turns()
    assert engines.asked == [1, 2, 0]
    engines.rolling.cancel()
    await turns()
    assert not engines.rolling.under_way
