"""The causal step: which event explains which, and the root: the suspect that nothing else explains."""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.events import Event
from appliance.diagnosis.xid import meaning_of

LASTING = frozenset(
    {
        Cause.GPU_OFF_BUS, Cause.GPU_MCU_HALT, Cause.GSP_TIMEOUT, Cause.NVLINK_ERROR, Cause.IOMMU_FAULT, Cause.ECC_UNCORRECTABLE,
        Cause.DRIVER_LIB_MISMATCH, Cause.DRIVER_NOT_READY, Cause.DRIVER_TOO_OLD, Cause.CONTAINER_LOST_GPU, Cause.GPU_NEEDS_RESET,
        Cause.GPU_UNKILLABLE_PROCESS, Cause.PCIE_ERROR,
    }
)  # fmt: skip
"""States, not moments: they explain whatever fails later in the same boot."""

VISIBLE_WINDOW_S = (-15.0, 15.0)
"""A fault that CUDA reports at once: kernel line minus engine line. Engines log to the second; teardown takes some."""
HOST_OOM_WINDOW_S = (-90.0, 15.0)
"""The kill comes first; systemd's watchdog may take a minute to notice a starved process."""
CLOCK_SLACK_S = 15.0
DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_SLACK_S = 60.0
END_OF_TIME_S = 32503680000.0
"""The year 3000: what claims to be later has no clock."""
ZONE_UNKNOWN_S = 15 * 3600.0
"""Clocks without a zone may differ by this much and still be of the same moment."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the causal step over one case."""

    root: Event | None
    explained: tuple[Event, ...]
    outside: tuple[tuple[Event, str], ...]
    rivals: tuple[Event, ...]
    """Suspects of the root's tier with another cause that the root does not explain by a named edge."""


EDGES_FILE = Path(__file__).parent / "edges.toml"


@functools.cache
def edges() -> dict[tuple[Cause, Cause], str]:
    """Named edges: (cause, what it explains) → why."""
    rows = tomllib.loads(EDGES_FILE.read_text(encoding="utf-8"))["edge"]
    return {(Cause.of(row["cause"]), Cause.of(effect)): str(row["why"]) for row in rows for effect in row["explains"]}


def explains(deeper: Event, other: Event) -> str | None:
    """Why `deeper` explains `other`, or None. Both are suspects of one case, inside its window."""
    if deeper is other or deeper.cause is None:
        return None
    if deeper.cause is other.cause and deeper.depth < other.depth:
        return "the same event in other words"
    named = None if other.cause is None else edges().get((deeper.cause, other.cause))
    mutual = other.cause is not None and (other.cause, deeper.cause) in edges()
    if named is not None and (deeper.order < other.order or (deeper.tier <= other.tier and not mutual)):
        return named
    if mutual and other.order < deeper.order and other.source is deeper.source:
        return None  # the particular stands first, and the general follows from it
    if deeper.tier < other.tier:
        return "a deeper fault stands in its window"
    return None


def decide(events: Sequence[Event]) -> Verdict:
    """The root among the suspects; the rest is explained by it, outside its window, or a rival."""
    suspects = [event for event in events if event.is_suspect]
    anchor = _anchor(events)
    inside: list[Event] = []
    outside: list[tuple[Event, str]] = []
    waited_s = _longest_wait(suspects)
    for event in suspects:
        reason = why_outside(event, anchor, waited_s)
        if reason is None:
            inside.append(event)
        else:
            outside.append((event, reason))
    deepest = _deepest(inside)
    unexplained = [event for event in deepest if not any(explains(other, event) for other in deepest)]
    candidates = sorted(unexplained or deepest, key=lambda event: event.depth)
    if not candidates:
        return Verdict(None, (), tuple(outside), ())
    root = _quoted_by(candidates[0], inside)
    rivals = tuple(event for event in candidates[1:] if event.cause is not root.cause and event.tier == root.tier)
    explained = tuple(event for event in inside if event is not root and event not in rivals)
    return Verdict(root, explained, tuple(outside), rivals)


_RAISED = re.compile(r"\b[A-Z]\w*(?:Error|Exception): (.{20,})$")


def _quoted_by(root: Event, inside: Sequence[Event]) -> Event:
    """The exception that the root's sentence passes on in its own words, or puts without the numbers; else the root itself."""
    for event in inside:
        if event.cause is not root.cause or event.source is not root.source or event.tier != root.tier or event.order >= root.order:
            continue
        said = _RAISED.search(event.text)
        if (said is not None and said[1][:200] in root.text) or ("asked_bytes" in event.fields and "asked_bytes" not in root.fields):
            return event
    return root


def _deepest(suspects: Sequence[Event]) -> list[Event]:
    """The deepest suspect of each cause and tier: the others of that cause are the same event in other words."""
    best: dict[tuple[Cause | None, int], Event] = {}
    for event in suspects:
        key = (event.cause, event.tier)
        if key not in best or event.depth < best[key].depth:
            best[key] = event
    return list(best.values())


def _anchor(events: Sequence[Event]) -> Event | None:
    """The moment of death: the engine's first fatal event, else its first suspect, else the last suspect of anybody."""
    engine = [event for event in events if event.source in (Source.ENGINE_LOG, Source.STACK) and (event.is_suspect or event.fatal)]
    timed = [event for event in engine if event.evidence.time_s is not None]
    if timed:
        return next((event for event in timed if event.fatal), timed[0])
    exits = [event for event in events if event.source is Source.EXIT and event.evidence.time_s is not None]
    others = [event for event in events if event.is_suspect and event.evidence.time_s is not None]
    return exits[0] if exits else others[-1] if others and not engine else None


def _longest_wait(suspects: Sequence[Event]) -> float:
    """How long the engine says that it waited before it gave up: what it waited for may have ended that long ago."""
    waits = [
        event.fields.get("timeout_s", DEFAULT_TIMEOUT_S) for event in suspects if event.tier == 4 and event.source is Source.ENGINE_LOG
    ]
    return max((wait if isinstance(wait, float) else DEFAULT_TIMEOUT_S for wait in waits), default=0.0)


def why_outside(event: Event, anchor: Event | None, waited_s: float = 0.0) -> str | None:
    """Why this suspect cannot belong to the death at `anchor`, or None when it can."""
    if anchor is None or event is anchor or anchor.evidence.time_s is None or event.evidence.time_s is None:
        return None
    if event.evidence.boot_id and anchor.evidence.boot_id and event.evidence.boot_id != anchor.evidence.boot_id:
        return "it belongs to another boot" if event.cause is not Cause.HOST_POWER_RESET else None
    delta_s = distance_s(event.evidence, anchor.evidence)
    if delta_s is None:
        return None
    if event.source is anchor.source or (_zone_unknown(event, anchor) and abs(delta_s) < ZONE_UNKNOWN_S):
        return None
    first_s, last_s = _window_of(event, anchor, waited_s)
    if first_s <= delta_s <= last_s:
        return None
    side = "before" if delta_s < 0 else "after"
    return f"it stands {abs(delta_s):.0f} s {side} the engine's end, outside the window of {first_s:.0f} s to {last_s:.0f} s"


def distance_s(one: Evidence, other: Evidence) -> float | None:
    """Seconds from `other` to `one`; a time without a year is taken to be of the other's year."""
    if one.time_s is None or other.time_s is None or not (0 <= one.time_s < END_OF_TIME_S and 0 <= other.time_s < END_OF_TIME_S):
        return None
    if bool(one.data.get("year_unknown")) is bool(other.data.get("year_unknown")):
        return one.time_s - other.time_s
    if one.data.get("year_unknown"):
        return _in_year_of(one.time_s, other.time_s) - other.time_s
    return one.time_s - _in_year_of(other.time_s, one.time_s)


def _in_year_of(time_s: float, model_s: float) -> float:
    moment = datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC)
    year = datetime.datetime.fromtimestamp(model_s, tz=datetime.UTC).year
    try:
        return moment.replace(year=year).timestamp()
    except ValueError:  # 29 February
        return moment.replace(year=year, day=28).timestamp()


def _zone_unknown(event: Event, anchor: Event) -> bool:
    return bool(event.evidence.data.get("zone_unknown")) is not bool(anchor.evidence.data.get("zone_unknown"))


def _window_of(event: Event, anchor: Event, waited_s: float) -> tuple[float, float]:
    if event.cause in LASTING or _lasting_xid(event):
        blocked_s = event.fields.get("blocked_s", 0.0)  # the kernel tells of a stuck task when it has been stuck for so long
        return (-float("inf"), CLOCK_SLACK_S + (blocked_s if isinstance(blocked_s, float) else 0.0))
    if event.cause in (Cause.HOST_OOM, Cause.KILLED_UNKNOWN):
        return (min(HOST_OOM_WINDOW_S[0], -waited_s - TIMEOUT_SLACK_S), HOST_OOM_WINDOW_S[1])  # the survivors waited for the killed one
    if anchor.tier == 4:
        timeout_s = anchor.fields.get("timeout_s", DEFAULT_TIMEOUT_S)
        return (-(float(timeout_s) if isinstance(timeout_s, float) else DEFAULT_TIMEOUT_S) - TIMEOUT_SLACK_S, CLOCK_SLACK_S)
    if waited_s and event.source is Source.KERNEL_LOG:
        return (-waited_s - TIMEOUT_SLACK_S, CLOCK_SLACK_S)
    if event.source in (Source.SYSTEMD, Source.EXIT, Source.STOP_LEDGER, Source.PROBE, Source.CGROUP, Source.GATEWAY):
        return (-120.0, 120.0)
    return VISIBLE_WINDOW_S


def _lasting_xid(event: Event) -> bool:
    return event.name == "xid" and meaning_of(int(float(str(event.fields.get("code") or 0)))).lasting
