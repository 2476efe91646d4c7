"""The machine's timers: one of each kind, set again by being set anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.supervisor import events as ev


class Timers:
    """Owns what runs; each posts TimerFired."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        self._running: dict[ev.Timer, asyncio.TimerHandle] = {}

    def set(self, effect: ev.SetTimer) -> None:
        """In place of the one of its kind that runs."""
        old = self._running.pop(effect.timer, None)
        if old is not None:
            old.cancel()
        event = ev.TimerFired(effect.generation, effect.timer)
        self._running[effect.timer] = asyncio.get_running_loop().call_later(effect.delay_s, self._post, event)

    def cancel(self) -> None:
        """All of them."""
        for timer in self._running.values():
            timer.cancel()
