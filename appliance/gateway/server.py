"""The gateway as a process: its parts put together, its listening sockets, its clock, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate
from pathlib import Path

from sdnotify import SystemdNotifier
from uvicorn import Config as UvicornConfig
from uvicorn.server import ServerState

from appliance.config import Config
from appliance.control.client import AsyncControl, subscribe
from appliance.core.errors import ApplianceError
from appliance.core.publication import Publication
from appliance.gateway.actions import Actions
from appliance.gateway.advisor import Advisor
from appliance.gateway.app import App
from appliance.gateway.connection import KEEP_ALIVE_S, ClientConnection, ConnectionPolicy
from appliance.gateway.cors import Cors
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.exposition import Exposition
from appliance.gateway.files import Files
from appliance.gateway.fuse import Fuse
from appliance.gateway.inflight import InflightTable, load_key
from appliance.gateway.intake import Intake
from appliance.gateway.lethal_lengths import LethalLengths
from appliance.gateway.live import Live
from appliance.gateway.metrics import Metrics
from appliance.gateway.pages import Pages
from appliance.gateway.profile import Profiler
from appliance.gateway.recent import Recent
from appliance.gateway.reception import Reception
from appliance.gateway.relay import Relay
from appliance.gateway.report import Reporter
from appliance.gateway.sources import Sources
from appliance.gateway.tls import SHUTDOWN_TIMEOUT_S
from appliance.listening import BACKLOG, url_of

log = logging.getLogger("gateway")

TICK_S = 0.5
LAST_WORDS_S = 1.0
"""After the drain's deadline, how long clients may take to read why their answer ends."""
_RECONNECT_FIRST_S = 0.05
_RECONNECT_MAX_S = 1.0


class Server:
    """Owns the listening sockets, the connections, and the tasks beside them."""

    def __init__(self, config: Config, files: Files, run_dir: Path, state_dir: Path) -> None:
        gateway = config.gateway
        self._config = config
        self._files = files
        self._control_path = run_dir / "control.sock"
        self._policy = ConnectionPolicy(gateway.header_timeout_s, gateway.write_timeout_s, gateway.disconnect_grace_s)
        self._doors = Doors(self._moved)
        metrics, inflight = Metrics(), InflightTable(load_key(state_dir))
        self._reporter = Reporter(AsyncControl(self._control_path), metrics.healthy_lengths)
        fused_s = config.resume.quarantine_ttl_s if config.admission.auto_fuse else 0.0
        fuse = Fuse(config.admission, self._doors, metrics, LethalLengths(fused_s, asyncio.get_running_loop().time))
        self._reporter.advised = fuse.advise
        self._relay = Relay(config, self._doors, fuse, inflight, self._reporter, metrics)
        self._sources = Sources(self._doors, AsyncControl(self._control_path))
        exposition = Exposition(metrics, files.fallback, self._doors, self._relay, fuse, inflight, self._policy, self._sources)
        self._advisor = Advisor(AsyncControl(self._control_path), self._doors, self._relay.slots.rooms, fuse.advise, self._moved)
        self._asker = AsyncControl(self._control_path)
        pages = Pages(config, self._doors, self._relay, fuse, inflight, metrics, self._policy, exposition, self._asker)
        actions = Actions(self._asker, enabled=gateway.admin_actions)
        self._live = Live(AsyncControl(self._control_path), pages.status, Recent(metrics), self._relay, inflight, actions, self._policy)
        self._profiler = Profiler(state_dir, config.metrics.traffic_days, time.time)
        reception = Reception(files.keys, config.admission, self._doors, inflight, self._profiler, metrics)
        cors = Cors(gateway.cors_origins)
        intake = Intake(gateway.max_body_bytes)
        app = App(cors, reception, fuse, files.fallback, intake, self._relay, pages, self._live, actions, inflight, self._reporter, metrics)
        self._state = ServerState()
        self._uvicorn = _uvicorn_config(app)
        self._notifier = SystemdNotifier()
        if self._notifier.socket is not None:  # who has stopped reading (a suspended `appliancectl run`) must not stop the loop
            self._notifier.socket.setblocking(False)
        self._watched = "WATCHDOG_USEC" in os.environ
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        loop.add_signal_handler(signal.SIGHUP, self._files.reload)
        self._tick()
        servers = [await self._listen(listener) for listener in listeners]
        where = ", ".join(url_of(listener, tls=self._files.tls is not None, as_bound=True) for listener in listeners)
        log.info("listening on %s", where)
        self._notifier.notify(f"READY=1\nSTATUS=listening on {where}")
        looking = self._live.keep_asking(), self._live.keep_series(), self._advisor.keep()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each) for each in (self._follow(), self._keep_time(), self._profiler.keep(), *looking)]
            await self._signals.get()
            for server in servers:
                server.close()
            await self._drain()
            for task in beside:
                task.cancel()
        self._doors.stop()
        self._reporter.close()
        self._sources.close()
        self._live.close()
        self._advisor.close()
        self._asker.close()

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if self._files.tls is None or listener.family == socket.AF_UNIX:
            return await loop.create_server(self._accept, sock=listener, backlog=BACKLOG)
        return await loop.create_server(
            self._accept,
            sock=listener,
            backlog=BACKLOG,
            ssl=self._files.tls.context,
            ssl_handshake_timeout=self._policy.header_timeout_s,
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )

    def _accept(self) -> ClientConnection:
        return ClientConnection(self._policy, self._uvicorn, self._state)

    # beside the requests

    def _moved(self) -> None:
        self._relay.settle()
        self._live.wake()

    async def _follow(self) -> None:
        """Publications, for ever; while applianced is away, ask for it again and again."""
        pause_s = _RECONNECT_FIRST_S
        while True:
            try:
                publications: AsyncIterator[Publication] = subscribe(self._control_path)
                async for publication in publications:
                    self._doors.publish(publication)
                    pause_s = _RECONNECT_FIRST_S
            except ApplianceError as error:
                self._doors.control_lost(error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RECONNECT_MAX_S)

    async def _keep_time(self) -> None:
        loop, period_s, late = asyncio.get_running_loop(), min(TICK_S, self._policy.header_timeout_s), False
        while True:
            slept_s = loop.time()
            await asyncio.sleep(period_s)
            # After a stop of this process, what clients have sent meanwhile is read, for a turn, before anybody is called late.
            late = not late and loop.time() - slept_s > period_s + TICK_S
            if not late:
                self._tick()
            if self._watched:
                self._notifier.notify("WATCHDOG=1")

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode("ascii"))]
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self._state.connections):
            assert isinstance(connection, ClientConnection)
            connection.check(now_s)

    # the end

    async def _drain(self) -> None:
        """Running answers may finish within `gateway.drain_s`; then they are told, then cut."""
        running = len(self._state.tasks)
        drain_s = self._config.gateway.drain_s
        log.info("stopping: %d requests run and may take %g s; another signal ends them now", running, drain_s)
        self._notifier.notify(f"STOPPING=1\nSTATUS=draining {running} requests")
        self._policy.draining = True
        self._live.wake()
        for connection in self._connections():
            connection.drain()
        await self._until_idle(drain_s)
        for connection in self._connections():
            connection.interrupt(
                Refused(503, "gateway_stopping", "the gateway was stopped before this answer was complete", retry_after_s=1)
            )
        await self._until_idle(LAST_WORDS_S)
        for connection in self._connections():
            connection.abort()
        await asyncio.sleep(0)

    async def _until_idle(self, patience_s: float) -> None:
        """Until no connection is left, the time is up, or a signal comes."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + patience_s
        while True:
            if not self._state.connections or not self._signals.empty() or loop.time() >= due_s:
                return
            await asyncio.sleep(0.02)

    def _connections(self) -> list[ClientConnection]:
        return [connection for connection in self._state.connections if isinstance(connection, ClientConnection)]


def _uvicorn_config(app: App) -> UvicornConfig:
    config = UvicornConfig(
        app,
        http=ClientConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return config
