"""What is seen of an engine life from outside, once a second: whether its load goes on, and whether the OOM killer struck in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from appliance.supervisor import loading
from appliance.supervisor.loading import Stall, Vitals

LOOK_S = 1.0
MEMBERS_S = 10.0
"""How often its processes are counted once it has loaded: engines start theirs early."""
TELL_S = 5.0
"""At most so often it is told that the load goes on."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Where findings go, and where they come from."""

    vitals: Callable[[], Vitals]
    oom_kills: Callable[[], int | None]
    stalled: Callable[[Stall], None]
    loading: Callable[[], None]
    """Bytes or memory were moved since this was told last."""
    oom_killed: Callable[[int], None]
    look: Callable[[], None]
    """Who belongs to it now?"""


class LifeWatch:
    """Looks until it is cancelled. Owns nothing but its task's time."""

    def __init__(self, stall_s: float, watched: Watched) -> None:
        self._stall_s = stall_s
        self._watched = watched
        self._loaded = False
        self._oom_kills = 0

    def loaded(self) -> None:
        """It answers: from here on silence is the prober's business."""
        self._loaded = True

    async def run(self) -> None:
        """Until the load stalls; OOM kills are counted for ever."""
        now_s = told_s = seen_s = time.monotonic()
        load = loading.begin(now_s, self._watched.vitals())
        while True:
            await asyncio.sleep(min(LOOK_S, self._stall_s / 4))
            self.count_oom_kills()
            if self._loaded:
                if time.monotonic() - seen_s >= MEMBERS_S:
                    seen_s = time.monotonic()
                    self._watched.look()
                continue
            now_s, vitals = time.monotonic(), self._watched.vitals()
            load = loading.looked(load, now_s, vitals, self._stall_s)
            if load.fed_s > told_s and now_s - told_s >= min(TELL_S, self._stall_s / 2):
                told_s = now_s
                self._watched.loading()
            stall = loading.judge(load, now_s, vitals, self._stall_s)
            if stall is not None:
                self._watched.stalled(stall)
                self._loaded = True

    def count_oom_kills(self) -> None:
        """Tell of new ones; also once more when the leader is gone."""
        count = self._watched.oom_kills() or 0
        if count > self._oom_kills:
            self._oom_kills = count
            self._watched.oom_killed(count)
