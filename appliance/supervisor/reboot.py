"""Rebooting the machine for the sake of a card, where the owner wants that: seldom, and never under somebody's hands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from appliance.config.schema import SupervisorTable
from appliance.core.units import format_duration
from appliance.supervisor.core_dumps import run
from appliance.supervisor.incidents import IncidentStore

KEY = "reboots"
MOST = 2
WITHIN_S = 24 * 3600.0
GRACE_S = 5.0
"""For supervisor.on_park, the record of the incident and the gateway's last answers."""
COMMAND_DEADLINE_S = 60.0
IDLE_POLL_S = 10.0
SESSIONS = Path("/run/systemd/sessions")

log = structlog.get_logger()


def why_not(mode: str, reboots: Sequence[float], now_s: float) -> str | None:
    """None when the machine may be rebooted now, as far as the owner and the past are concerned."""
    if mode == "never":
        return "supervisor.auto_reboot is never"
    # A moment that lies ahead is one of a clock that has gone back since: it counts, lest a dead clock battery reboots for ever.
    recent = [moment_s for moment_s in reboots if now_s - moment_s < WITHIN_S]
    if len(recent) >= MOST:
        again = format_duration(min(recent) + WITHIN_S - now_s)
        return f"it was rebooted {len(recent)} times within 24 h already, which has not helped; again in {again} at the earliest"
    return None


def logged_in(sessions: Path = SESSIONS) -> int:
    """How many people are on the machine, as logind counts them."""
    count = 0
    with contextlib.suppress(OSError):
        for file in sessions.iterdir():
            words = file.read_text(errors="replace").split()
            count += "CLASS=user" in words and "STATE=closing" not in words
    return count


async def reboot(mode: str, command: Sequence[str], store: IncidentStore, reason: str, grace_s: float = GRACE_S) -> None:
    """Run the owner's reboot command, if it may be; the attempt is on record before it is made, for else it might be made for ever."""
    await asyncio.sleep(grace_s)
    kept = await asyncio.to_thread(store.recall, KEY)
    reboots = [float(moment_s) for moment_s in kept.get("times", [])]
    objection = why_not(mode, reboots, time.time()) or await _unrecorded(store)
    if objection is not None:
        log.warning(f"the machine is not rebooted because {objection}", reason=reason)
        return
    while mode == "idle" and (people := logged_in()):
        log.info("the machine waits to be rebooted until nobody is logged in", people=people)
        await asyncio.sleep(IDLE_POLL_S)
    store.keep(KEY, {"times": [*reboots[-MOST:], time.time()]})
    objection = await _unrecorded(store)
    if objection is not None:
        log.warning(f"the machine is not rebooted because {objection}", reason=reason)
        return
    log.warning(f"rebooting the machine because {reason}", command=" ".join(command))
    if not await run(("/bin/sh", "-c", '"$@" && echo done', "sh", *command), COMMAND_DEADLINE_S):
        log.error("supervisor.reboot_command failed: the machine was not rebooted", command=" ".join(command))


async def _unrecorded(store: IncidentStore) -> str | None:
    """Why nobody could tell afterwards how often it was; None where all that was to be kept is kept."""
    try:
        await asyncio.to_thread(store.flush)
    except TimeoutError:
        return "the disk does not answer, and nobody could tell afterwards how often it was"
    return f"nobody could tell afterwards how often it was: {store.problem}" if store.problem is not None else None


class Rebooter:
    """Owns the reboot that is under way: one at a time, and none once the machine serves again or a person is at it."""

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None

    @property
    def asked(self) -> bool:
        """It was begun, and not called off."""
        return self._task is not None

    def begin(self, wanted: SupervisorTable, reason: str) -> None:
        """In place of the one that is under way; nothing where the owner wants none."""
        self.call_off()
        if wanted.auto_reboot != "never":
            work = reboot(wanted.auto_reboot, wanted.reboot_command, self._store, reason)
            self._task = asyncio.get_running_loop().create_task(work, name="reboot")
            self._task.add_done_callback(_tell_defect)

    def obey(self, wanted: SupervisorTable) -> None:
        """The owner may have changed their mind while it waits for people to leave."""
        if wanted.auto_reboot == "never":
            self.call_off()

    def call_off(self) -> None:
        """It is not wanted any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _tell_defect(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("the reboot failed by a defect; please report this", exc_info=error)
