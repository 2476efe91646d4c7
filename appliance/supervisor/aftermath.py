"""What is found out about a crash once the service is back: what the recorder shows, the stack in the core dump. It delays no restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from appliance.core.evidence import Evidence, Source
from appliance.core.flight import FlightRecord
from appliance.diagnosis.flight import DUMPS_WITHIN_S, core_dumps, findings
from appliance.planner.inputs import DEFAULT_RED_LINE
from appliance.supervisor.core_dumps import Death, Dump, dump_of, dumps_of
from appliance.supervisor.heap import give_back
from appliance.supervisor.incidents import IncidentStore

SETTLE_MAX_S = 600.0
"""A service that is not back by then is not coming back by itself: nobody is disturbed any more."""

log = structlog.get_logger()


async def examine(
    incident_id: str,
    death: Death | None,
    flight: FlightRecord | None,
    store: IncidentStore,
    settled: Callable[[], Awaitable[None]],
    own_folder: Path,
    gather: Callable[[], list[Evidence]] = list,
    caught: Callable[[str, int], None] = lambda _incident, _pieces: None,
    program: str = "",
) -> None:
    """Wait until the service is back or given up, look closer, and add what is found to the incident.

    Args:
        death: of the leader by a signal, if that is how it ended.
        flight: the last minutes before the crash.
        settled: returns when it is back or given up.
        own_folder: cores that landed there are removed when they have been read: it lies in memory.
        gather: what instruments left behind, where the engine had been started with any; reads files.
        program: the engine's, whose core dumps of the last day are looked for.
        caught: told of the incident and of how many pieces there were.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_MAX_S):
            await settled()
    red_line_bytes = round(DEFAULT_RED_LINE * flight.vram_total_bytes) if flight is not None else 0
    shown = findings(flight.samples, red_line_bytes=red_line_bytes or None) if flight is not None else []
    if shown:
        store.add_evidence(incident_id, shown)
    if program:
        now_s = time.time()
        earlier = core_dumps(await dumps_of(program, now_s - DUMPS_WITHIN_S), now_s=now_s)
        store.add_evidence(incident_id, earlier)
    left = await asyncio.to_thread(gather)
    if left:
        store.add_evidence(incident_id, left)
    frames = await _core(incident_id, death, store, own_folder) if death is not None else 0
    if left or frames:
        caught(incident_id, len(left) + frames)
    give_back()


async def _core(incident_id: str, death: Death, store: IncidentStore, own_folder: Path) -> int:
    """Read the core dump, if there is one; the number of frames."""
    dump = await dump_of(death)
    if dump is None:
        return 0
    store.add_evidence(incident_id, evidence_of(dump, death))
    log.info("a core dump was read", incident=incident_id, path=dump.path, frames=len(dump.frames))
    if dump.path and Path(dump.path).parent in (own_folder, Path(death.cwd)):
        with contextlib.suppress(OSError):
            Path(dump.path).unlink()
    return len(dump.frames)


def evidence_of(dump: Dump, death: Death) -> tuple[Evidence, ...]:
    """The dump, then its frames."""
    found = f"core dump of {Path(death.program).name} (pid {death.pid}, {death.signal}) {dump.path}".strip()
    first = Evidence(Source.CORE_DUMP, found, death.time_s, data={"signal": death.signal})
    frames = (Evidence(Source.STACK, frame, death.time_s, line) for line, frame in enumerate(dump.frames, 1))
    return (first, *frames)
