"""One engine life: listen, load, serve, drain.

HTTP answers from the first moment (`/health` says 503 loading), the model loads in a thread, and SIGTERM lets what runs
finish. Exit codes: 0 asked to stop, 1 the address is in use, 66 the model folder is bad, 70 a defect, 78 the settings
cannot be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from appliance.core.errors import ApplianceError, ModelError
from appliance.engine.api.app import make_app
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.listen import endpoint_of
from appliance.engine.report import report_batches

log = logging.getLogger("appliance.engine.server")

EXIT_STOPPED = 0
EXIT_BAD_MODEL = 66
"""EX_NOINPUT of sysexits.h."""
EXIT_BAD_SETTINGS = 78
"""EX_CONFIG."""

_DRAIN_REPORT_S = 5.0
_KEEP_ALIVE_S = 75
"""Longer than the gateway's probes are apart, so that they reuse one connection."""


class EngineServer:
    """The HTTP server and the model behind it.

    Attributes:
        service: the state that the endpoints see.
    """

    def __init__(self, service: Service, load: Callable[[], LoadedModel], write_timeout_s: float) -> None:
        """`load` blocks until the model can answer; it runs in a thread of its own."""
        self.service = service
        self._load = load
        self._stop = asyncio.Event()
        config = uvicorn.Config(
            make_app(service),
            http=impatient_protocol(write_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._http = _Http(config)

    async def run(self, listener: socket.socket) -> int:
        """Serve until asked to stop; returns the exit code.

        Raises:
            Exception: whatever `load` raised, except an ApplianceError.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        log.info("Listening on %s.", endpoint_of(listener))
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._become_ready())
        await _first_of(serving, stopping, loading)
        if loading.done():
            try:
                loading.result()
            except ApplianceError as error:
                log.error("%s: %s", type(error).__name__, error)  # the kind is what diagnosis goes by
                return EXIT_BAD_MODEL if isinstance(error, ModelError) else EXIT_BAD_SETTINGS
            reporting = asyncio.create_task(report_batches(self.service))
            await _first_of(serving, stopping)
            await self._drain()
            reporting.cancel()
            self._http.should_exit = True
            await serving
        log.info("The engine has stopped.")
        return EXIT_STOPPED

    async def _become_ready(self) -> None:
        started_s = time.monotonic()
        self.service.model = await asyncio.to_thread(self._load)
        limits = self.service.model.limits
        log.info(
            "The engine is ready. model=%s context_length_tokens=%d max_running=%d kv_tokens=%d elapsed=%.2f s",
            limits.model_id,
            limits.context_length_tokens,
            limits.max_running,
            limits.kv_tokens,
            time.monotonic() - started_s,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("%s received again. Exiting at once with %d requests unfinished.", name, self.service.active)
            logging.shutdown()
            os._exit(EXIT_STOPPED)
        log.info("%s received. Running requests: %d; new ones are refused.", name, self.service.active)
        self.stop()

    def stop(self) -> None:
        """Refuse new requests, let `run` return once the running ones are answered."""
        self.service.draining = True
        self._stop.set()

    async def _drain(self) -> None:
        """Until the last running request is answered; the supervisor's stop deadline is the only limit."""
        while self.service.active:
            log.info("Gracefully exiting… Remaining number of requests: %d.", self.service.active)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.service.until_idle(), _DRAIN_REPORT_S)


async def _first_of(serving: asyncio.Task[None], *others: asyncio.Task[Any]) -> None:
    """Until one of the others is done. HTTP that ended by itself is a defect, whatever else goes on."""
    await asyncio.wait({serving, *others}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        raise serving.exception() or RuntimeError("the HTTP server ended by itself")


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: they would stop serving before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """For uvicorn 0.29 and later."""
        yield

    def install_signal_handlers(self) -> None:
        """For uvicorn before 0.29."""


def impatient_protocol(write_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol that cuts a connection whose client takes no bytes for so long.

    While the transport is full, `send` waits and nothing is added, so its buffer shrinks exactly when the client reads.
    Cutting it looks like any other disconnect to the request: its sequence is aborted.
    """

    class ImpatientProtocol(HttpToolsProtocol):
        _stalled: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            self._stalled = self.loop.call_later(write_timeout_s, self._check, self.transport.get_write_buffer_size())

        def _check(self, before_bytes: int) -> None:
            if self.transport.get_write_buffer_size() < before_bytes:
                self._watch()
                return
            log.warning("A client read nothing for %g s while its answer waits. Its connection is closed.", write_timeout_s)
            self.transport.abort()

        def _forget(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return ImpatientProtocol
