"""applianced put together: supervisor, control socket, signals. Everything is given back in the end, whatever ended it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from appliance.config.schema import Config
from appliance.control.server import ControlServer, Handler, PublicationBoard
from appliance.core.errors import ApplianceError
from appliance.supervisor import events as ev
from appliance.supervisor.notify import Notifier
from appliance.supervisor.reload import Change
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.run_note import RunNote, Unclosed

log = structlog.get_logger()


class Served(Protocol):
    """One supervisor, or several that speak as one (fleet.py)."""

    run_dir: RunDir
    notifier: Notifier
    board: PublicationBoard

    async def run(self, unclosed: Unclosed | None = None) -> None:
        """Until stopped."""

    def post(self, event: ev.Event) -> None:
        """Something was asked for."""

    def reload(self, config: Config) -> Sequence[Change]:
        """Take over what can be taken over; says what changed and when it counts."""


class Service:
    """Owns the control server, the signal handlers and the note of this run of one applianced."""

    def __init__(self, served: Served, handlers: Mapping[str, Handler], note: RunNote, load: Callable[[], Config]) -> None:
        self._served = served
        self._note = note
        self._load = load
        self._server = ControlServer(served.run_dir.control_socket, handlers, served.board)
        self._stops = 0

    async def run(self) -> None:
        """Until a stop was asked for and done. Raises ControlError when the socket cannot be bound."""
        await self._server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        keeping = loop.create_task(self._note.keep(self._served.board), name="run note")
        try:
            await self._served.run(self._note.unclosed)
            await asyncio.sleep(0)  # the last publication has been posted: let the subscribers' tasks write it
            await asyncio.sleep(0)
            await _ended(keeping)
            self._note.close()
        finally:
            await _ended(keeping)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            await self._server.close()

    def _stop(self, number: signal.Signals) -> None:
        self._stops += 1
        self._served.post(ev.StopRequested(f"{number.name} to applianced", immediately=self._stops > 1))

    def _reload(self) -> None:
        notifier = self._served.notifier
        notifier.reloading()
        try:
            changed = self._served.reload(self._load())
        except ApplianceError as error:
            log.error("the configuration was not reloaded; the old one stays in force", error=str(error))
        else:
            for change in changed:
                log.info("reloaded", key=change.key, before=str(change.before), after=str(change.after), when=change.when.value)
            if not changed:
                log.info("reloaded: nothing has changed")
        finally:
            notifier.ready()  # else the service manager takes us to be reloading for ever


async def _ended(keeping: asyncio.Task[None]) -> None:
    keeping.cancel()
    (outcome,) = await asyncio.gather(keeping, return_exceptions=True)
    if isinstance(outcome, Exception):  # what is worth a line in the log is not worth the service
        log.error("the note of this run was not kept; please report this", exc_info=outcome)
