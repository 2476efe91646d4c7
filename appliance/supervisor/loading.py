"""When a load is a stall: a pure judgement over what all processes of an engine life have done since they were looked at last.

Not a fixed time-out: a model of 400 GB from a slow disk takes as long as it takes. What counts as progress:
* bytes read or written (files, downloads), memory that was never in use before, a line in its log: it loads;
* CPU time: it compiles, captures graphs, or moves weights to the card. That alone keeps it from being a stall, but past its start
  deadline it has to do more than that: an engine that spins for ever computes too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.core.units import KIB, MIB, format_duration

MOVED_MIN_BYTES = 64 * KIB
"""Fewer within a whole stall are what our own probes and a heartbeat come to."""
GROWN_MIN_BYTES = MIB
CPU_MIN_SHARE = 1 / 30
"""Of one CPU, over the time that makes a stall; answering our own probes takes a tenth of it."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """All processes of a life together, since each began.

    Attributes:
        moved_bytes: read and written, by system calls and by the disk.
        lines: of the engine's log, those about our own probes left out.
        states: the kernel's letters of all of them, such as "DS".
    """

    moved_bytes: int
    memory_bytes: int
    cpu_s: float
    lines: int
    states: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What is remembered between two looks.

    Attributes:
        moved_s: when progress was seen last.
        at: what the vitals were then; its memory is the most there ever was.
        fed_s: when bytes or memory, and not just CPU time or words, were seen last.
    """

    moved_s: float
    at: Vitals
    fed_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The verdict, with the numbers that it stands on."""

    silent_s: float
    allowed_s: float
    states: str

    @property
    def is_stopped(self) -> bool:
        """Somebody stopped it by a signal: no setting is to blame."""
        return "T" in self.states

    def __str__(self) -> str:
        return (
            f"the load has stalled: for {format_duration(self.silent_s)} no bytes were read, no memory was taken, no CPU was used and "
            f"nothing was logged (supervisor.start_stall_s = {self.allowed_s:g})"
        )


def begin(now_s: float, vitals: Vitals) -> Load:
    """It was just started."""
    return Load(now_s, vitals, now_s)


def looked(load: Load, now_s: float, vitals: Vitals, stall_s: float) -> Load:
    """After another look. A process that ended took its counters along: then the marks are set anew."""
    fed = vitals.moved_bytes - load.at.moved_bytes >= MOVED_MIN_BYTES or vitals.memory_bytes - load.at.memory_bytes >= GROWN_MIN_BYTES
    if fed or vitals.cpu_s - load.at.cpu_s >= CPU_MIN_SHARE * stall_s or vitals.lines > load.at.lines:
        most = max(vitals.memory_bytes, load.at.memory_bytes)
        return Load(now_s, replace(vitals, memory_bytes=most), now_s if fed else load.fed_s)
    if vitals.moved_bytes < load.at.moved_bytes or vitals.cpu_s < load.at.cpu_s:
        lower = replace(load.at, moved_bytes=min(vitals.moved_bytes, load.at.moved_bytes), cpu_s=min(vitals.cpu_s, load.at.cpu_s))
        return replace(load, at=lower)
    return load


def judge(load: Load, now_s: float, vitals: Vitals, stall_s: float) -> Stall | None:
    """After `looked`."""
    silent_s = now_s - load.moved_s
    return Stall(silent_s, stall_s, vitals.states) if silent_s > stall_s else None
