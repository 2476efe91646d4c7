"""The last minutes of the engine and its cards, a sample a second, for whoever wants to know what came before a crash."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from appliance.core.flight import FlightRecord, FlightSample
from appliance.gpu.nvml import NvmlGpu, NvmlReport
from appliance.supervisor.probe import Counters

SAMPLE_S = 1.0
KEPT = 15 * 60


@dataclass(frozen=True, slots=True)
class CardsSample:
    """One second of each card that answered. For people who watch; an incident keeps the sums alone."""

    time_s: float
    gpus: tuple[NvmlGpu, ...]


class FlightRecorder:
    """Owns the samples. They go on over engine lives: what stands before a crash may belong to the life before."""

    def __init__(
        self, ask_nvml: Callable[[], Awaitable[NvmlReport]], counters: Callable[[], Counters | None], uses_gpu: Callable[[], bool]
    ) -> None:
        self._ask_nvml = ask_nvml
        self._counters = counters
        self._uses_gpu = uses_gpu
        self._samples: deque[FlightSample] = deque(maxlen=KEPT)
        self._cards: deque[CardsSample] = deque(maxlen=KEPT)
        self._driver = ""

    async def run(self) -> None:
        """For ever. An NVML that hangs costs samples, not the service."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            report = await self._ask_nvml() if self._uses_gpu() else None
            counters = self._counters()
            if report is not None or counters is not None:
                self._samples.append(self._sample(report, counters or Counters()))
            if report is not None and _heard(report):
                self._cards.append(CardsSample(round(time.time(), 1), tuple(gpu for gpu in report.gpus if gpu.problem is None)))
                self._driver = report.driver or self._driver

    @property
    def record(self) -> FlightRecord | None:
        """What an incident keeps."""
        if not self._samples:
            return None
        gpus = self._cards[-1].gpus if self._cards else ()
        record = FlightRecord.of(self._samples, sum(gpu.total_bytes for gpu in gpus))
        return replace(record, driver=self._driver, cards=tuple(f"{gpu.address} {gpu.name}".strip() for gpu in gpus))

    def since(self, time_s: float) -> tuple[FlightRecord, tuple[CardsSample, ...]]:
        """What was sampled after that moment: the sums, and card by card."""
        samples = FlightRecord.of(sample for sample in self._samples if round(sample.time_s, 1) > time_s)
        return samples, tuple(sample for sample in self._cards if sample.time_s > time_s)

    def _sample(self, report: NvmlReport | None, counters: Counters) -> FlightSample:
        before = self._samples[-1] if self._samples else FlightSample(0.0, 0)
        gpus = report.gpus if report is not None and _heard(report) else ()
        return FlightSample(
            time_s=time.time(),
            # Cards that do not answer have not become empty: what was known last stands.
            vram_used_bytes=sum(gpu.used_bytes for gpu in gpus) if report is not None and _heard(report) else before.vram_used_bytes,
            running=counters.running,
            waiting=counters.waiting,
            block_violations=counters.block_violations,
            kv_blocks_used=counters.kv_blocks_used,
            temperature_c=max((gpu.temperature_c or 0 for gpu in gpus), default=0),
            power_w=sum(gpu.power_w or 0.0 for gpu in gpus),
        )


def _heard(report: NvmlReport) -> bool:
    return report.code == 0 and not report.hung
