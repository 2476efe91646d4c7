"""Writes the traffic profile (appliance/traffic.py): counted in memory, added to the file once a minute by a thread.

A disk that is full or a file that is broken costs the profile, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance.traffic import CACHED_PERCENT, CONCURRENCY, FILE, GAP_MS, HOUR_S, SCHEMA, bucket_of

log = logging.getLogger("gateway.profile")

FLUSH_S = 60.0
DAY_HOURS = 24
_CORRUPT = ("file is not a database", "malformed", "no such column", "has no column")


@dataclass(slots=True)
class Counts:
    """What has not been written yet."""

    lengths: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """(hour, prompt bucket, answer bucket)"""
    levels: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    """(hour, kind, bucket)"""

    def __bool__(self) -> bool:
        return bool(self.lengths or self.levels)


class Profiler:
    """Counts arrivals and answers. `keep_days` of 0 counts nothing."""

    def __init__(self, state_dir: Path, keep_days: int, wall_s: Callable[[], float]) -> None:
        self._path = state_dir / FILE
        self._keep_hours = keep_days * DAY_HOURS
        self._wall_s = wall_s
        self._counts = Counts()
        self._last_arrival_s: float | None = None
        self._complained = False

    def arrived(self, now_s: float, in_flight: int) -> None:
        """A request came while so many others were there."""
        if self._keep_hours:
            hour = int(self._wall_s() // HOUR_S)
            self._counts.levels[hour, CONCURRENCY, bucket_of(in_flight)] += 1
            if self._last_arrival_s is not None:
                self._counts.levels[hour, GAP_MS, bucket_of(1000 * (now_s - self._last_arrival_s))] += 1
            self._last_arrival_s = now_s

    def answered(self, prompt_tokens: int, answer_tokens: int, cached_tokens: int) -> None:
        """A request was answered."""
        if self._keep_hours:
            hour = int(self._wall_s() // HOUR_S)
            self._counts.lengths[hour, bucket_of(prompt_tokens), bucket_of(answer_tokens)] += 1
            cached_percent = 100 * cached_tokens / prompt_tokens if prompt_tokens else 0
            self._counts.levels[hour, CACHED_PERCENT, bucket_of(cached_percent)] += 1

    async def keep(self) -> None:
        """Write, for ever; the last minute is written when this is cancelled."""
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                await asyncio.to_thread(self._write, self._taken())
        finally:
            self._write(self._taken())

    def _taken(self) -> Counts:
        counts, self._counts = self._counts, Counts()
        return counts

    def _write(self, counts: Counts) -> None:
        if not counts:
            return
        try:
            try:
                self._add(counts)
            except sqlite3.DatabaseError as error:
                if not any(words in str(error) for words in _CORRUPT):
                    raise
                log.warning("%s is broken (%s): it is moved aside, and a new one is begun", self._path, error)
                self._path.replace(self._path.with_suffix(".broken"))
                self._add(counts)
        except (sqlite3.Error, OSError) as error:
            if not self._complained:
                log.warning("the traffic profile cannot be written to %s: %s", self._path, error)
            self._complained = True
        else:
            self._complained = False

    def _add(self, counts: Counts) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self._path, timeout=5.0)) as database:
            database.executescript(SCHEMA)
            with database:
                database.executemany(
                    "INSERT INTO lengths VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
                    [(*key, count) for key, count in counts.lengths.items()],
                )
                database.executemany(
                    "INSERT INTO levels VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
                    [(*key, count) for key, count in counts.levels.items()],
                )
                oldest = int(self._wall_s() // HOUR_S) - self._keep_hours
                database.execute("DELETE FROM lengths WHERE hour < ?", (oldest,))
                database.execute("DELETE FROM levels WHERE hour < ?", (oldest,))
