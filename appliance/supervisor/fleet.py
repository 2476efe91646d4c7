"""An engine on each card: a supervisor each, in one loop, and what they are together to everybody else.

They share what there is once (box.py, the database, the control socket, the service manager's ear) and nothing else: history, rungs,
generations and engines are each one's own. What goes wrong in one of them, a defect of ours included, stays there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from appliance.config.schema import Config
from appliance.control.server import PublicationBoard
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.box import Box
from appliance.supervisor.chorus import Chorus
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.layout import Layout
from appliance.supervisor.notify import Notifier
from appliance.supervisor.reboot import Rebooter
from appliance.supervisor.reload import Change, changes, merged
from appliance.supervisor.rolling import RollingRestart
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.run_note import Unclosed
from appliance.supervisor.summing import summed

ANEW_S = 5.0
"""After a defect of ours in one of them, before it is begun anew."""

log = structlog.get_logger()
Make = Callable[[Config, RunDir, IncidentStore, Notifier, Box], Supervisor]


@dataclass(slots=True)
class Replica:
    """One of them. `broken`: what is published in its place while it is not; None while it runs."""

    index: int
    card: str
    supervisor: Supervisor
    broken: Publication | None = None

    @property
    def publication(self) -> Publication:
        """The newest."""
        return self.broken or self.supervisor.board.current


class Fleet:
    """Owns the supervisors. Speaks like one (service.Served)."""

    def __init__(
        self, config: Config, layout: Layout, run_dir: RunDir, store: IncidentStore, notifier: Notifier, box: Box, make: Make
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.store = store
        self.notifier = notifier
        self.began_s = time.monotonic()
        self._box = box
        self._layout = layout
        self._make = make
        self._chorus = Chorus(notifier, self.refresh)
        self._stopping = asyncio.Event()
        self._reboots = Rebooter(store)
        self.replicas = tuple(Replica(index, share.card, self._made(index)) for index, share in enumerate(layout.shares))
        self._before = max(0, run_dir.generation - sum(one.publication.generation for one in self.replicas))
        self.board = PublicationBoard(self._summed())
        self.rolling = RollingRestart(self.board, self.cards)

    @property
    def cards(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(share.card for share in self._layout.shares)

    async def run(self, unclosed: Unclosed | None = None) -> None:
        """Until all of them have stopped."""
        keeping = [asyncio.ensure_future(self._keep(one, unclosed if one.index == 0 else None)) for one in self.replicas]
        try:
            await asyncio.gather(*keeping)
        finally:
            self.rolling.cancel()
            self._reboots.call_off()
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._box.close()

    def post(self, event: ev.Event) -> None:
        """To all of them."""
        if isinstance(event, ev.StopRequested):
            self.rolling.cancel()
            self._stopping.set()
        for one in self.replicas:
            one.supervisor.post(event)

    def reload(self, config: Config) -> tuple[Change, ...]:
        """Take over what can be taken over, each of them; says what changed and when it counts."""
        found = changes(self.config, config)
        self.config = merged(self.config, config)
        self._reboots.obey(self.config.supervisor)
        for one in self.replicas:
            one.supervisor.reload(self._layout.of(self.config))
        return found

    def refresh(self) -> None:
        """One of them has published something."""
        now = self._summed()
        if now.generation != self.board.current.generation:
            self.run_dir.note_generation(now.generation)
        self.board.post(now)
        self.notifier.status(now.reason)
        if not all(one.state is EngineState.PARKED for one in now.replicas) or self._box.cards.usable():
            self._reboots.call_off()
        elif not self._reboots.asked:  # every card is lost, and nothing else brings one back
            self._reboots.begin(self.config.supervisor, f"every card was lost in this boot: {self._box.cards.words}")

    def _summed(self) -> Publication:
        return summed([one.publication for one in self.replicas], self.cards, self._before)

    def _made(self, index: int) -> Supervisor:
        share, config = self._layout.shares[index], self._layout.of(self.config)
        box = self._box.of_card(index, share.card, share.refusal)
        return self._make(config, self.run_dir.replica(index), self.store.of_card(share.card), self._chorus.part(index), box)

    async def _keep(self, one: Replica, unclosed: Unclosed | None) -> None:
        structlog.contextvars.bind_contextvars(card=one.card)  # in every line of its log from here on
        while True:
            try:
                if one.broken is not None:
                    one.supervisor, one.broken = self._made(one.index), None
                    self.refresh()
                self._chorus.begins(one.index)
                await one.supervisor.run(unclosed)
                return
            except Exception as error:
                log.exception("the supervisor of one card failed by a defect and is begun anew; please report this", after_s=ANEW_S)
                self._break(one, error)
            finally:
                self._chorus.ends(one.index)
            unclosed = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANEW_S):
                    await self._stopping.wait()
                one.broken = replace(one.publication, state=EngineState.STOPPED, reason="stopped", retry_after_s=None)
                self.refresh()
                return

    def _break(self, one: Replica, error: Exception) -> None:
        sentence = f"applianced itself failed here ({type(error).__name__}: {error}) and begins anew in {ANEW_S:g} s; please report this"
        generation = one.supervisor.state.generation
        one.broken = Publication(EngineState.BACKOFF, generation, None, None, sentence, retry_after_s=ANEW_S)
        self.refresh()
