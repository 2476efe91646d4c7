"""applianced's own log: entries to the journal or lines to stderr, written by a thread, so that a terminal that was stopped with Ctrl-S or
a pipe that nobody reads cannot stop the supervisor. What does not fit into the queue is dropped, and the drop is told."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from appliance.supervisor import journal

QUEUE_LINES = 10_000
FLUSH_S = 1.0


Entry = Mapping[str, Any] | str


def _line(entry: Entry) -> bytes:
    return f"{entry}\n".encode(errors="replace")


class Outlet:
    """Owns the thread. One a process."""

    def __init__(self, descriptor: int, encode: Callable[[Entry], bytes] = _line) -> None:
        self._descriptor = descriptor
        self._encode = encode
        self._lines: queue.Queue[Entry | None] = queue.Queue(QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def put(self, line: Entry) -> None:
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
                data = self._encode(line)
                while data:
                    data = data[os.write(self._descriptor, data) :]


class _OutletLogger:
    """What structlog calls: every level is one line."""

    def __init__(self, outlet: Outlet) -> None:
        self.msg = outlet.put

    log = debug = info = warn = warning = error = critical = exception = fatal = property(lambda self: self.msg)


def configure(descriptor: int = 2) -> Outlet:
    """Entries with fields for the journal, JSON lines for a pipe, readable ones for a person at a terminal."""
    to_journal = journal.connected(os.environ, descriptor)
    readable = to_journal is None and os.isatty(descriptor)
    outlet = Outlet(descriptor) if to_journal is None else Outlet(to_journal, journal.datagram)
    if to_journal is not None:
        renderer: Any = lambda _, __, event: ((event,), {})  # noqa: E731 - structlog's signature; the outlet encodes it
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=True) if readable else structlog.processors.JSONRenderer()
    tracebacks: list[Any] = [] if readable else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,  # whose it is, with several engines (fleet.py)
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not readable),
            *tracebacks,
            renderer,
        ],
        logger_factory=lambda *_: _OutletLogger(outlet),
        cache_logger_on_first_use=False,
    )
    return outlet
