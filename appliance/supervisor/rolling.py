"""Restarting several engines one after the other, so that clients always have one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from appliance.control.server import PublicationBoard
from appliance.core.errors import ControlError
from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, EngineState

Ask = Callable[[], Awaitable[object]]
"""Asks one of them to restart. Raises ControlError where it cannot now."""

log = structlog.get_logger()


def order(each: Sequence[Publication]) -> list[int]:
    """Those first that answer nobody: they have nothing to lose, and the others are restarted beside one more."""
    return sorted(range(len(each)), key=lambda index: (each[index].state in ANSWERING, index))


class RollingRestart:
    """Owns the one that is under way."""

    def __init__(self, board: PublicationBoard, cards: Sequence[str]) -> None:
        self._board = board
        self._cards = cards
        self._task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether one has begun that is not at its end."""
        return self._task is not None and not self._task.done()

    def begin(self, asks: Sequence[Ask]) -> None:
        """In the background; an ask for each of them."""
        self._task = asyncio.get_running_loop().create_task(self._run(asks), name="rolling restart")
        self._task.add_done_callback(_tell_defect)

    def cancel(self) -> None:
        """Something else is wanted. Whoever restarts goes on; the others keep the engine they have."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, asks: Sequence[Ask]) -> None:
        for index in order(self._board.current.replicas):
            before, card = self._board.current.replicas[index], self._cards[index]
            try:
                await asks[index]()
            except ControlError as refusal:
                log.info("the rolling restart passes over one engine", card=card, error=str(refusal))
                continue
            if not await self._is_back(index, before):
                log.warning("the rolling restart ends here, for this engine did not come back; the others keep what they have", card=card)
                return
        log.info("the rolling restart is done")

    async def _is_back(self, index: int, before: Publication) -> bool:
        """Waits. One that did not answer before may park again: that is no reason to spare the others."""
        async for publication in self._board.follow():
            now = publication.replicas[index]
            if now.state in ANSWERING and now.generation > before.generation:
                return True
            if now.state is EngineState.PARKED:
                return before.state not in ANSWERING
            if now.state is EngineState.STOPPED:
                return False
        raise AssertionError("a board is followed for ever")


def _tell_defect(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("the rolling restart failed; please report this", exc_info=error)
