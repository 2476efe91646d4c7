"""applianced's own log: structured lines to stderr, written by a thread, so that a terminal that was stopped with Ctrl-S or a
pipe that nobody reads cannot stop the supervisor. What does not fit into the queue is dropped, and the drop is told."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any

import structlog

QUEUE_LINES = 10_000
FLUSH_S = 1.0


class Outlet:
    """Owns the thread. One a process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Never waits."""
        try:
            if self._dropped:
                self._lines.put_nowait(f"... {self._dropped} log lines were dropped: nobody read them")
                self._dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued, for FLUSH_S at the most."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(FLUSH_S)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                data = f"{line}\n".encode(errors="replace")
                while data:
                    data = data[os.write(self._descriptor, data) :]


class _OutletLogger:
    """What structlog calls: every level is one line."""

    def __init__(self, outlet: Outlet) -> None:
        self.msg = outlet.put

    log = debug = info = warn = warning = error = critical = exception = fatal = property(lambda self: self.msg)


def configure(descriptor: int = 2) -> Outlet:
    """JSON lines for a journal, readable ones for a person at a terminal."""
    outlet = Outlet(descriptor)
    readable = os.isatty(descriptor)
    renderer: Any = structlog.dev.ConsoleRenderer(colors=True) if readable else structlog.processors.JSONRenderer()
    tracebacks: list[Any] = [] if readable else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not readable),
            *tracebacks,
            renderer,
        ],
        logger_factory=lambda *_: _OutletLogger(outlet),
        cache_logger_on_first_use=False,
    )
    return outlet
