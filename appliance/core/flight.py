"""What the flight recorder keeps: a sample a second of the last minutes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlightSample:
    """One second.

    Attributes:
        vram_used_bytes: on all cards together; 0 where none is used.
        temperature_c, power_w: of the hottest card, and of all of them; 0 where the cards do not say.
        running, waiting: requests, as the engine counts them.
        kv_blocks_used: of its KV cache.
        block_violations: KV blocks whose reference count stood outside its bounds, counted since the engine's start.
    """

    time_s: float
    vram_used_bytes: int
    running: int = 0
    waiting: int = 0
    block_violations: int = 0
    kv_blocks_used: int = 0
    temperature_c: int = 0
    power_w: float = 0.0


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """Samples by column, oldest first: as an incident keeps them, a fifth of the size."""

    time_s: tuple[float, ...]
    vram_used_bytes: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    block_violations: tuple[int, ...]
    kv_blocks_used: tuple[int, ...]
    temperature_c: tuple[int, ...]
    power_w: tuple[float, ...]
    vram_total_bytes: int = 0
    """Of all cards together; 0 where it is not known."""
    driver: str = ""
    """Of the cards; empty where there are none, or nobody says."""
    cards: tuple[str, ...] = ()
    """What stands in the box, as `address name`."""

    @classmethod
    def of(cls, samples: Iterable[FlightSample], vram_total_bytes: int = 0) -> FlightRecord:
        """By column."""
        rows = [
            (
                round(sample.time_s, 1), sample.vram_used_bytes, sample.running, sample.waiting, sample.block_violations,
                sample.kv_blocks_used, sample.temperature_c, round(sample.power_w, 1),
            )
            for sample in samples
        ]  # fmt: skip
        columns = zip(*rows, strict=True) if rows else ((),) * 8
        return dataclasses.replace(cls(*columns), vram_total_bytes=vram_total_bytes)

    @property
    def samples(self) -> tuple[FlightSample, ...]:
        """By second."""
        columns = (
            self.time_s, self.vram_used_bytes, self.running, self.waiting, self.block_violations, self.kv_blocks_used,
            self.temperature_c, self.power_w,
        )  # fmt: skip
        return tuple(FlightSample(*row) for row in zip(*columns, strict=True))
