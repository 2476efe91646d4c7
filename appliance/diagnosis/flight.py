"""What the flight recorder's last minutes show: swings of video memory, block counts out of bounds, core dumps.

Pure functions over samples; each finding is evidence like any other, so the chain and the report can cite it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.core.evidence import Evidence, Source
from appliance.core.flight import FlightSample
from appliance.core.units import MIB, format_bytes, format_duration

SWING_BYTES = 300 * MIB
SWING_WITHIN_S = 180.0
CLIMB_BYTES = 500 * MIB
CLIMB_WITHIN_S = 60.0
TEETH = 3
DUMPS_WITHIN_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class CoreDump:
    """One dump on the disk or in the journal."""

    time_s: float
    program: str
    signal: str
    path: str = ""


def findings(samples: Sequence[FlightSample], *, red_line_bytes: int | None = None) -> list[Evidence]:
    """Everything of note in the samples, in order of time (oldest sample first)."""
    found = [_swing(samples), _climb(samples), _saw_tooth(samples), _violations(samples)]
    if red_line_bytes is not None:
        found.append(_over(samples, red_line_bytes))
    return sorted((item for item in found if item is not None), key=lambda item: item.time_s or 0.0)


def core_dumps(dumps: Sequence[CoreDump], *, now_s: float) -> list[Evidence]:
    """The engine's dumps of the last 24 hours."""
    return [
        Evidence(
            Source.CORE_DUMP, f"core dump of {dump.program} ({dump.signal}) {dump.path}".strip(), dump.time_s, data={"signal": dump.signal}
        )
        for dump in dumps
        if 0 <= now_s - dump.time_s <= DUMPS_WITHIN_S
    ]


def _evidence(kind: str, text: str, time_s: float, **data: float) -> Evidence:
    return Evidence(Source.NVML, text, time_s, data={"kind": kind, **data})


def _swing(samples: Sequence[FlightSample]) -> Evidence | None:
    """The widest difference of use inside three minutes."""
    widest, at = 0, None
    for window in _windows(samples, SWING_WITHIN_S):
        used = [sample.vram_used_bytes for sample in window]
        if max(used) - min(used) > widest:
            widest, at = max(used) - min(used), window[-1]
    if at is None or widest <= SWING_BYTES:
        return None
    text = f"video memory swung by {format_bytes(widest)} within {format_duration(SWING_WITHIN_S)} (limit {format_bytes(SWING_BYTES)})"
    return _evidence("vram_swing", text, at.time_s, swing_bytes=float(widest))


def _climb(samples: Sequence[FlightSample]) -> Evidence | None:
    """The steepest rise inside a minute."""
    steepest, at = 0, None
    for window in _windows(samples, CLIMB_WITHIN_S):
        low = window[0].vram_used_bytes
        for sample in window:
            low = min(low, sample.vram_used_bytes)
            if sample.vram_used_bytes - low > steepest:
                steepest, at = sample.vram_used_bytes - low, sample
    if at is None or steepest <= CLIMB_BYTES:
        return None
    text = f"video memory rose by {format_bytes(steepest)} within a minute (limit {format_bytes(CLIMB_BYTES)})"
    return _evidence("vram_climb", text, at.time_s, climb_bytes=float(steepest))


def _saw_tooth(samples: Sequence[FlightSample]) -> Evidence | None:
    """Three or more falls of over half the swing's limit, each after a rise as large: allocate, free, allocate."""
    teeth, low, high, rising = 0, None, None, True
    at = 0.0
    for sample in samples:
        used = sample.vram_used_bytes
        low = used if low is None else low
        high = used if high is None else high
        if rising:
            high = max(high, used)
            if high - used > SWING_BYTES // 2 and high - low > SWING_BYTES // 2:
                teeth, at, rising, low = teeth + 1, sample.time_s, False, used
        else:
            low = min(low, used)
            if used - low > SWING_BYTES // 2:
                rising, high = True, used
    if teeth < TEETH:
        return None
    return _evidence("vram_saw_tooth", f"video memory rose and fell {teeth} times like a saw", at, teeth=float(teeth))


def _violations(samples: Sequence[FlightSample]) -> Evidence | None:
    """Reference counts of KV blocks outside their bounds."""
    first = next((sample for sample in samples if sample.block_violations > 0), None)
    if first is None:
        return None
    count = samples[-1].block_violations
    return _evidence(
        "block_violations", f"reference counts of KV blocks stood outside their bounds {count} times", first.time_s, count=float(count)
    )


def _over(samples: Sequence[FlightSample], red_line_bytes: int) -> Evidence | None:
    """Use over the red line of the plan."""
    over = [sample for sample in samples if sample.vram_used_bytes > red_line_bytes]
    if not over:
        return None
    most = max(sample.vram_used_bytes for sample in over)
    text = f"video memory in use reached {format_bytes(most)}, over the red line of {format_bytes(red_line_bytes)}, in {len(over)} samples"
    return _evidence("vram_red_line", text, over[0].time_s, most_bytes=float(most))


def _windows(samples: Sequence[FlightSample], width_s: float) -> list[Sequence[FlightSample]]:
    """For each sample, the samples of the time before it, itself included."""
    windows, start = [], 0
    for end, sample in enumerate(samples):
        while sample.time_s - samples[start].time_s > width_s:
            start += 1
        windows.append(samples[start : end + 1])
    return windows
