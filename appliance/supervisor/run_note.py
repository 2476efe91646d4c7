"""The note of this run of applianced, kept where a kill does not reach: the next one reads in it how the last one ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.control.server import PublicationBoard
from appliance.core.evidence import Evidence, Source
from appliance.core.states import ANSWERING, EngineState
from appliance.diagnosis import read_evidence
from appliance.supervisor import proc_table
from appliance.supervisor.core_dumps import run
from appliance.supervisor.groups import own_cgroup
from appliance.supervisor.incidents import IncidentStore

KEY = "run"
HEARD_EVERY_S = 30.0
"""Of a machine that lost its power it is known to so many seconds when that was."""
JOURNAL_DEADLINE_S = 10.0
_BEFORE_S, _LINES = 5.0, 200


@dataclass(frozen=True, slots=True)
class Unclosed:
    """A run of applianced that nobody closed.

    Attributes:
        heard_s: when it wrote its note last; it ended after that.
        uptime_s: how long it had served by then; 0 where it did not.
        rebooted: another boot has begun since.
    """

    pid: int
    heard_s: float
    state: str
    generation: int
    uptime_s: float
    rebooted: bool
    boot_id: str | None

    @property
    def served(self) -> bool:
        """Clients were being answered."""
        return self.state in {state.value for state in ANSWERING}

    def evidence(self, now_s: float) -> Evidence:
        """The fact."""
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.heard_s))
        since = "; the machine was started anew since" if self.rebooted else ""
        text = f"applianced (pid {self.pid}, {self.state}) ended without a stop after {heard}, when it was heard of last{since}"
        data: dict[str, object] = {"kind": "unclosed_run", "pid": self.pid, "rebooted": self.rebooted, "away_s": now_s - self.heard_s}
        return Evidence(Source.PROBE, text, self.heard_s, boot_id=self.boot_id, data=data)


class RunNote:
    """Owns the note. Read when it is made, written from then on."""

    def __init__(self, store: IncidentStore, boot_id: str | None) -> None:
        self._store = store
        self._boot_id = boot_id
        stat = proc_table.read_stat(os.getpid())
        self._note: dict[str, Any] = {"pid": os.getpid(), "start_ticks": stat.start_ticks if stat is not None else 0, "boot_id": boot_id}
        self._served_s: float | None = None
        self.unclosed = _unclosed(store.recall(KEY), boot_id)

    def write(self, state: str, generation: int, *, answering: bool) -> None:
        """Where we stand now."""
        now_s = time.monotonic()  # the wall clock may be set while it serves
        self._served_s = (self._served_s or now_s) if answering else None
        served = {"uptime_s": now_s - self._served_s if self._served_s is not None else 0.0}
        self._note |= {"heard_s": time.time(), "state": state, "generation": generation, "closed": False} | served
        self._store.keep(KEY, dict(self._note))

    def close(self) -> None:
        """We were told to end."""
        self._store.keep(KEY, {**self._note, "closed": True})

    async def keep(self, board: PublicationBoard) -> None:
        """Write what is published, and that we live; for ever."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._follow(board))
            both.create_task(self._keep_fresh())

    async def _follow(self, board: PublicationBoard) -> None:
        before: tuple[EngineState, int] | None = None
        async for publication in board.follow():
            now = publication.state, publication.generation
            if now != before:
                before = now
                self.write(publication.state.value, publication.generation, answering=publication.state in ANSWERING)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(HEARD_EVERY_S)
            if "state" in self._note:
                self.write(self._note["state"], self._note["generation"], answering=self._served_s is not None)


def _unclosed(note: dict[str, Any], boot_id: str | None) -> Unclosed | None:
    """What the last run's note says, unless it was closed, or its process is another applianced that lives on this folder."""
    if note.get("closed", True) or not isinstance(note.get("heard_s"), (int, float)):
        return None
    rebooted = note.get("boot_id") != boot_id
    stat = None if rebooted else proc_table.read_stat(int(note["pid"]))
    if stat is not None and stat.is_alive and stat.start_ticks == note.get("start_ticks"):
        return None
    uptime_s = float(note.get("uptime_s") or 0.0)
    return Unclosed(
        int(note["pid"]), float(note["heard_s"]), str(note.get("state", "")), int(note.get("generation") or 0), uptime_s, rebooted,
        note.get("boot_id"),
    )  # fmt: skip


def own_unit() -> str | None:
    """The unit of systemd that runs us; None where none does."""
    return next((part for part in reversed((own_cgroup() or "").split("/")) if part.endswith(".service")), None)


async def systemd_says(unclosed: Unclosed, unit: str | None) -> list[Evidence]:
    """systemd's lines about the end of that run, out of the journal; empty where there is no unit or no journal. Takes seconds."""
    if unit is None:
        return []
    since = f"@{int(unclosed.heard_s - _BEFORE_S)}"
    said = await run(
        ("journalctl", "--no-pager", "--quiet", "-o", "json", "--since", since, "-n", str(_LINES), "-u", unit, "_PID=1"), JOURNAL_DEADLINE_S
    )
    return [item for item in read_evidence(said, Source.SYSTEMD) if item.source is Source.SYSTEMD and item.text] if said else []


def about(pid: int, kernel: Sequence[Evidence]) -> list[Evidence]:
    """The kernel's lines that name this process, marked as ours."""
    words = (f"pid={pid},", f"process {pid} (", f"[{pid}]:")
    return [
        Evidence(item.source, item.text, item.time_s, item.line, item.boot_id, {**item.data, "of_engine": True})
        for item in kernel
        if any(word in item.text for word in words)
    ]
