"""The flight recorder's checks, with their limits from both sides."""

from __future__ import annotations

import pytest

from appliance.core.evidence import Evidence, Source
from appliance.core.flight import FlightSample
from appliance.core.units import GIB, MIB
from appliance.diagnosis import diagnose
from appliance.diagnosis.flight import CoreDump, core_dumps, findings


def track(*used_mib: float, step_s: float = 1.0) -> list[FlightSample]:
    """Samples of 20 GiB plus so many MiB."""
    return [FlightSample(1000.0 + index * step_s, 20 * GIB + round(value * MIB)) for index, value in enumerate(used_mib)]


def kinds(found: list[Evidence]) -> list[object]:
    """The kinds of the findings."""
    return [item.data["kind"] for item in found]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], []),
        (track(0, 1, 0, 2), []),
        (track(0, 300), []),
        (track(0, 301), ["vram_swing"]),
        (track(0, 301, step_s=200), []),
        (track(0, 501), ["vram_climb", "vram_swing"]),
        (track(501, 0), ["vram_swing"]),
        (track(0, 501, step_s=61), ["vram_swing"]),
        (track(*([0, 160] * 4), 0), ["vram_saw_tooth"]),
        (track(*([0, 140] * 9)), []),
    ],
)
def test_swings_climbs_and_teeth_are_found_past_their_limits(samples: list[FlightSample], expected: list[str]) -> None:
    """300 MB within three minutes, 500 MB within one, three teeth of half the swing."""
    assert sorted(map(str, kinds(findings(samples)))) == expected


def test_the_red_line_and_the_block_counts() -> None:
    """Use over the plan's line; counts out of bounds, from their first second."""
    samples = [
        FlightSample(1.0, 22 * GIB),
        FlightSample(2.0, 23 * GIB, block_violations=1),
        FlightSample(3.0, 22 * GIB, block_violations=4),
    ]
    found = {item.data["kind"]: item for item in findings(samples, red_line_bytes=int(22.5 * GIB))}
    assert found["vram_red_line"].time_s == 2.0
    assert found["block_violations"].time_s == 2.0
    assert "4 times" in found["block_violations"].text
    assert "23.00 GiB, over the red line of 22.50 GiB" in found["vram_red_line"].text


def test_core_dumps_of_the_last_day_count() -> None:
    """Older ones, and ones of the future, do not."""
    dumps = [
        CoreDump(0.0, "python3", "SIGSEGV"),
        CoreDump(90_000.0, "python3", "SIGSEGV", "/var/lib/x"),
        CoreDump(2e5, "python3", "SIGABRT"),
    ]
    (item,) = core_dumps(dumps, now_s=100_000.0)
    assert (item.source, item.time_s) == (Source.CORE_DUMP, 90_000.0)


def test_findings_are_shown_and_never_blamed() -> None:
    """A swing beside an allocation failure stands in the chain; alone it is no crash's cause."""
    swing = findings(track(0, 301))
    oom = Evidence(Source.ENGINE_LOG, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB.", 1002.0)
    verdict = diagnose([*swing, oom])
    assert verdict.cause.label == "cuda_oom_runtime"
    assert any(link.citation.source is Source.NVML for link in verdict.chain)
    assert diagnose(swing).cause.label == "unknown"


def test_a_core_dump_names_the_end() -> None:
    """SIGSEGV in a dump of this crash; one of another hour is refuted."""
    died = Evidence(Source.ENGINE_LOG, "ERROR core.py EngineCore encountered a fatal error.", 90_001.0)
    dumps = core_dumps([CoreDump(90_000.0, "python3", "SIGSEGV")], now_s=100_000.0)
    assert diagnose([died, *dumps]).cause.label == "segfault_native"
    late = Evidence(Source.ENGINE_LOG, died.text, 97_000.0)
    assert diagnose([late, *dumps]).cause.label == "unknown"
