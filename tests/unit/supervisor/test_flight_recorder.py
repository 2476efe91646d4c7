"""A sample a second, bounded, honest about what it does not know."""

from __future__ import annotations

import asyncio

import pytest

from appliance.core.flight import FlightRecord, FlightSample
from appliance.core.units import MIB
from appliance.diagnosis.flight import findings
from appliance.gpu.nvml import NvmlGpu, NvmlReport
from appliance.supervisor import flight_recorder
from appliance.supervisor.flight_recorder import FlightRecorder
from appliance.supervisor.probe import Counters

COUNTERS = Counters(progress=1, running=2, waiting=3, kv_blocks_used=4, block_violations=5)


def gpus(*used_mib: int) -> NvmlReport:
    """Two cards that answer."""
    return NvmlReport(gpus=tuple(NvmlGpu(used_bytes=used * MIB, temperature_c=60 + used % 7, power_w=100.5) for used in used_mib))


async def recorded(*reports: NvmlReport, counters: Counters | None = COUNTERS, uses_gpu: bool = True) -> FlightRecorder:
    """After so many samples."""
    queue = list(reports)
    done = asyncio.Event()

    async def ask() -> NvmlReport:
        if len(queue) == 1:
            done.set()
        return queue.pop(0) if len(queue) > 1 else queue[0]

    recorder = FlightRecorder(ask, lambda: counters, lambda: uses_gpu)
    running = asyncio.create_task(recorder.run())
    if uses_gpu:
        await done.wait()
    await asyncio.sleep(0.05)
    running.cancel()
    return recorder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred samples a second."""
    monkeypatch.setattr(flight_recorder, "SAMPLE_S", 0.01)


async def test_use_over_the_red_line_can_be_told() -> None:
    """The record says what the cards have, so that 95 % of it can be a line."""
    cards = NvmlReport(gpus=(NvmlGpu(used_bytes=980 * MIB, total_bytes=1000 * MIB), NvmlGpu(used_bytes=990 * MIB, total_bytes=1000 * MIB)))
    record = (await recorded(cards)).record
    assert record is not None and record.vram_total_bytes == 2000 * MIB
    assert any("red line" in item.text for item in findings(record.samples, red_line_bytes=round(0.95 * record.vram_total_bytes)))


async def test_cards_and_engine_are_sampled_together() -> None:
    """Memory of all cards, the hottest one, all power, and the engine's own counters."""
    recorder = await recorded(gpus(1000, 2000))
    assert recorder.record is not None
    sample = recorder.record.samples[0]
    assert (sample.vram_used_bytes, sample.temperature_c, sample.power_w) == (3000 * MIB, 60 + 1000 % 7, 201.0)
    assert (sample.running, sample.waiting, sample.kv_blocks_used, sample.block_violations) == (2, 3, 4, 5)


async def test_the_record_names_driver_and_cards() -> None:
    """What crashes may have in common; an answer without a driver's version takes none away."""
    cards = (NvmlGpu("0000:01:00.0", name="NVIDIA GeForce RTX 3090"), NvmlGpu("0000:41:00.0"))
    record = (await recorded(NvmlReport(driver="550.90.07", gpus=cards), NvmlReport(gpus=cards))).record
    assert record is not None
    assert (record.driver, record.cards) == ("550.90.07", ("0000:01:00.0 NVIDIA GeForce RTX 3090", "0000:41:00.0"))


async def test_an_nvml_that_hangs_does_not_empty_the_cards() -> None:
    """What was known last stands, so that silence is not taken for a swing of 23 GiB; what did swing is told."""
    recorder = await recorded(gpus(23_000, 100), NvmlReport(hung=True, problem="hung"), counters=Counters())
    assert recorder.record is not None
    assert set(recorder.record.vram_used_bytes) == {23_100 * MIB}
    assert findings(recorder.record.samples) == []
    recorder = await recorded(gpus(20_000, 0), gpus(20_700, 0), counters=Counters())
    assert recorder.record is not None
    assert {item.data["kind"] for item in findings(recorder.record.samples)} == {"vram_swing", "vram_climb"}


async def test_without_a_card_the_engine_alone_is_sampled_and_nothing_without_both() -> None:
    """NVML is not asked."""
    recorder = await recorded(NvmlReport(), uses_gpu=False)
    assert recorder.record is not None
    assert set(recorder.record.vram_used_bytes) == {0}
    assert (await recorded(NvmlReport(), uses_gpu=False, counters=None)).record is None


def test_a_record_is_its_samples_by_column() -> None:
    """There and back; none at all too."""
    samples = tuple(FlightSample(float(second), 5, 1, 2, 3, 4, 60, 99.5) for second in range(3))
    record = FlightRecord.of(samples)
    assert record.time_s == (0.0, 1.0, 2.0)
    assert record.samples == samples
    assert FlightRecord.of(()).samples == ()
