"""applianced put together: supervisor, control socket, signals. Everything is given back in the end, whatever ended it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog

from appliance.config.schema import Config
from appliance.control.server import ControlServer
from appliance.core.errors import ConfigError
from appliance.supervisor import events as ev
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.verbs import Verbs

log = structlog.get_logger()


class Service:
    """Owns the control server and the signal handlers of one applianced."""

    def __init__(self, supervisor: Supervisor, load: Callable[[], Config]) -> None:
        self._supervisor = supervisor
        self._load = load
        self._server = ControlServer(supervisor.run_dir.control_socket, Verbs(supervisor).handlers, supervisor.board)
        self._stops = 0

    async def run(self) -> None:
        """Until a stop was asked for and done. Raises ControlError when the socket cannot be bound."""
        await self._server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            await self._supervisor.run()
            await asyncio.sleep(0)  # the last publication has been posted: let the subscribers' tasks write it
            await asyncio.sleep(0)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            await self._server.close()

    def _stop(self, number: signal.Signals) -> None:
        self._stops += 1
        self._supervisor.post(ev.StopRequested(f"{number.name} to applianced", immediately=self._stops > 1))

    def _reload(self) -> None:
        notifier = self._supervisor.notifier
        notifier.reloading()
        try:
            changed = self._supervisor.reload(self._load())
        except ConfigError as error:
            log.error("the configuration was not reloaded; the old one stays in force", error=str(error))
        else:
            for change in changed:
                log.info("reloaded", key=change.key, before=str(change.before), after=str(change.after), when=change.when.value)
            if not changed:
                log.info("reloaded: nothing has changed")
        notifier.ready()
