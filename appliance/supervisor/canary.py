"""One short real prompt to an engine that is idle: a server may answer its health check and be dead behind it.

While requests run, their progress tells; while none do, nothing would. So after a quiet time the engine is asked for a token, one
prompt at a time, and never while clients are served: their requests are the better proof, and the canary may not be in their way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from appliance.supervisor.hang import CPU_BUSY_SHARE, Hang, HangLimits, Silence

RETRY_S = 0.5
Ask = Callable[[], Coroutine[Any, Any, str | None]]
"""Sends the prompt; None when a token came back, else what is wrong."""


@dataclass(slots=True)
class _Flight:
    """A canary under way."""

    task: asyncio.Task[str | None]
    began_s: float
    cpu_s: float
    failed_before: bool


class Canary:
    """Owns the request that is under way. Asked after each answered probe; says when the engine is dead."""

    def __init__(self, ask: Ask, quiet_s: float, limits: HangLimits) -> None:
        self._ask = ask
        self._quiet_s = quiet_s
        self._limits = limits
        self._flight: _Flight | None = None
        self._failed = False
        self._due_s = time.monotonic() + quiet_s
        self._progress: int | None = None

    def look(self, now_s: float, cpu_s: float, progress: int | None, running: int, waiting: int) -> Hang | None:
        """The engine's own counters at this moment; whether the canary has told that it is dead."""
        if running + waiting > (1 if self._flight is not None else 0):
            self.close()  # clients are here: it would wait behind them, and their progress tells
            self._postpone(now_s)
        elif self._flight is None and progress != self._progress:
            self._postpone(now_s)
        self._progress = progress
        if self._flight is not None:
            return self._follow(self._flight, now_s, cpu_s)
        if self._quiet_s and now_s >= self._due_s:
            self._flight = _Flight(asyncio.get_running_loop().create_task(self._ask()), now_s, cpu_s, self._failed)
        return None

    def close(self) -> None:
        """Give up what is under way."""
        if self._flight is not None:
            self._flight.task.cancel()
            self._flight = None

    def _follow(self, flight: _Flight, now_s: float, cpu_s: float) -> Hang | None:
        silent_s = now_s - flight.began_s
        if not flight.task.done():
            busy = cpu_s - flight.cpu_s > CPU_BUSY_SHARE * silent_s
            allowed_s = self._limits.ceiling_s if busy else self._limits.floor_s
            words = f"a short prompt to the idle engine; it {'computes' if busy else 'uses no CPU'}"
            return Hang(Silence.CANARY, silent_s, allowed_s, 0, words) if silent_s > allowed_s else None
        problem, self._flight = flight.task.result(), None
        if problem is None:
            self._postpone(now_s)
            return None
        if flight.failed_before:
            return Hang(Silence.CANARY, silent_s, 0.0, 0, f"a short prompt to the idle engine failed twice: {problem}")
        self._failed, self._due_s = True, now_s + RETRY_S
        return None

    def _postpone(self, now_s: float) -> None:
        """It has just shown that it works, or is about to."""
        self._failed, self._due_s = False, now_s + self._quiet_s
