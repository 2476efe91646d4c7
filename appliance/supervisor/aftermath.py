"""What is found out about a crash once the service is back: what the recorder shows, the stack in the core dump. It delays no restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from appliance.core.evidence import Evidence, Source
from appliance.core.flight import FlightRecord
from appliance.diagnosis.flight import findings
from appliance.supervisor.core_dumps import Death, Dump, dump_of
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
) -> None:
    """Wait until the service is back or given up, look closer, and add what is found to the incident.

    Args:
        death: of the leader by a signal, if that is how it ended.
        flight: the last minutes before the crash.
        settled: returns when it is back or given up.
        own_folder: cores that landed there are removed when they have been read: it lies in memory.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_MAX_S):
            await settled()
    shown = findings(flight.samples) if flight is not None else []
    if shown:
        store.add_evidence(incident_id, shown)
    dump = await dump_of(death) if death is not None else None
    if death is None or dump is None:
        return
    store.add_evidence(incident_id, evidence_of(dump, death))
    log.info("a core dump was read", incident=incident_id, path=dump.path, frames=len(dump.frames))
    if dump.path and Path(dump.path).parent == own_folder:
        with contextlib.suppress(OSError):
            Path(dump.path).unlink()


def evidence_of(dump: Dump, death: Death) -> tuple[Evidence, ...]:
    """The dump, then its frames."""
    found = f"core dump of {Path(death.program).name} (pid {death.pid}, {death.signal}) {dump.path}".strip()
    first = Evidence(Source.CORE_DUMP, found, death.time_s, data={"signal": death.signal})
    frames = (Evidence(Source.STACK, frame, death.time_s, line) for line, frame in enumerate(dump.frames, 1))
    return (first, *frames)
