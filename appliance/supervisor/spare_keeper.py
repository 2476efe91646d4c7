"""Keeps one warm spare beside a serving engine, and gives it away when the engine has to be replaced.

Whatever is wrong with a spare costs a cold start and nothing else: it is asked whether it lives, ended when it does not answer or
when it has loaded something that is wanted no more, and replaced in the background, ever more rarely if that keeps failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from appliance.core.launch import LaunchSpec, SpareSpec
from appliance.core.units import format_bytes, format_duration
from appliance.supervisor.groups import Group
from appliance.supervisor.life import Start
from appliance.supervisor.memory_room import available_bytes
from appliance.supervisor.spare import Spare

SETTLE_S = 1.0
"""After an engine came back: its clients' answers first."""
LOOK_S = 5.0
RETRY_FIRST_S = 10.0
RETRY_MAX_S = 600.0
GOOD_AFTER_S = 60.0
"""A spare that was ready so long is not what fails."""
ROOM_BYTES = 1024**3
"""Memory that must be available before a spare is started: several times what it takes, because it is worth less than anything else."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted now.

    Attributes:
        spec: of the spare that could become the next life; None: no spare is wanted.
        now: one may be started; else one that is there may stay.
        why_not: for the status, where none is wanted.
    """

    spec: SpareSpec | None
    now: bool = False
    why_not: str = ""


class SpareKeeper:
    """Owns the spare, if there is one. `take` and the task are the only writers, both in the loop's thread."""

    def __init__(self, wish: Callable[[], Wish], group: Callable[[int], Group], start: Start) -> None:
        self._wish = wish
        self._group = group
        self._start = start
        self._spare: Spare | None = None
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._number = 0
        self._failures = 0
        self._next_try_s = 0.0
        self._words = "none yet: one is started when the engine serves"

    def look(self) -> None:
        """Something has changed that the wish depends on."""
        if self._task is None or self._task.done():
            self._task = self._start(self._run(), "spare", None)
        self._woken.set()

    def take(self, spec: LaunchSpec) -> Spare | None:
        """The spare, if it can become this life now; it is the caller's then. One that cannot is ended beside."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        other = spare.spec != spec.spare
        problem = "has loaded something else than is wanted now" if other else spare.unfit
        if problem is None:
            self._failures, self._next_try_s = 0, 0.0
            self._words = "the last one took over: the next is started when the engine serves"
            return spare
        log.info(f"starting the engine cold because the warm spare {problem}", pid=spare.pid)
        self._start(spare.dismiss(), "dismiss", None)
        return None

    @property
    def sensor(self) -> dict[str, object]:
        """For the status."""
        spare = self._spare
        if spare is None:
            return {"ok": not self._failures, "detail": self._words}
        if spare.warm_s is None:
            return {"ok": not self._failures, "detail": f"pid {spare.pid} loads since {_ago(spare.began_s)}"}
        return {"ok": True, "detail": f"ready since {_ago(spare.warm_s)} (pid {spare.pid}); {spare.cost}".removesuffix("; ")}

    async def close(self) -> None:
        """applianced ends. Its task is cancelled by whoever has `start`."""
        if self._spare is not None:
            await self._spare.dismiss()
            self._spare = None

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            wish = self._wish()
            if self._spare is not None:
                await self._check(self._spare, wish)
            if self._spare is None and not wish.now:
                self._words = wish.why_not or self._words
            elif self._spare is None and wish.spec is not None and time.monotonic() >= self._next_try_s:
                await self._begin(wish.spec)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if wish.spec is not None else None):
                    await self._woken.wait()

    async def _check(self, spare: Spare, wish: Wish) -> None:
        unwanted = spare.spec != wish.spec
        if spare.lost is None and not unwanted and await spare.answers():
            if spare.warm_s is not None and time.monotonic() - spare.warm_s > GOOD_AFTER_S:
                self._failures = 0
            return
        if self._spare is not spare:  # it was taken while we asked
            return
        self._spare = None
        if unwanted:
            self._next_try_s = 0.0
        else:
            self._put_off(f"the warm spare {spare.lost}")
        await spare.dismiss()

    async def _begin(self, spec: SpareSpec) -> None:
        await asyncio.sleep(SETTLE_S)
        wish = self._wish()
        if not wish.now or wish.spec != spec:
            return
        free_bytes = available_bytes()
        if free_bytes is not None and free_bytes < ROOM_BYTES:
            self._put_off(f"only {format_bytes(free_bytes)} of memory are available, a spare wants {format_bytes(ROOM_BYTES)} to be")
            return
        self._number += 1
        try:
            self._spare = Spare(spec, self._group(self._number), self._woken.set)
        except OSError as error:
            self._put_off(f"a spare cannot be started: {error.strerror or error}")

    def _put_off(self, why: str) -> None:
        self._failures += 1
        wait_s = min(RETRY_FIRST_S * 2 ** (self._failures - 1), RETRY_MAX_S)
        self._next_try_s = time.monotonic() + wait_s
        self._words = f"{why}; the next try is in {format_duration(wait_s)}, until then a crash costs a cold start"
        log.warning(self._words)


def _ago(since_s: float) -> str:
    return format_duration(time.monotonic() - since_s)
