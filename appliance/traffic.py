"""The traffic profile: how long, how many at once, how often. Histograms by the hour in SQLite; never a text, a key or an address.

The gateway writes it (appliance/gateway/profile.py); whoever wants to replay the shape of a box's traffic reads it.

    lengths(hour, prompt, answer, count)    answered requests, by the buckets of their prompt and answer tokens
    levels(hour, kind, bucket, count)       kind: concurrency, gap_ms or cached_percent; see Profile

`hour` counts from the epoch in UTC. A bucket's number says its lower bound: bound_of(bucket).
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.core.errors import ApplianceError

FILE = "traffic.db"
"""In the state folder."""
HOUR_S = 3600
VERSION = 1
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS lengths (
    hour INTEGER, prompt INTEGER, answer INTEGER, count INTEGER, PRIMARY KEY (hour, prompt, answer)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS levels (
    hour INTEGER, kind TEXT, bucket INTEGER, count INTEGER, PRIMARY KEY (hour, kind, bucket)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
CONCURRENCY, GAP_MS, CACHED_PERCENT = "concurrency", "gap_ms", "cached_percent"


def bucket_of(value: float) -> int:
    """Two buckets an octave: 0 for less than 1, then 1 for 1, 2 for 1.41..., 3 for 2, 5 for 4, and so on."""
    return 0 if value < 1 else 1 + math.floor(2 * math.log2(value))


def bound_of(bucket: int) -> float:
    """The smallest value in the bucket."""
    return 0.0 if bucket <= 0 else 2.0 ** ((bucket - 1) / 2)


@dataclass(frozen=True, slots=True)
class Profile:
    """Counts by bucket.

    Attributes:
        lengths: (prompt bucket, answer bucket) → answered requests.
        concurrency: requests in flight when another one came → how often.
        gap_ms: milliseconds between two arrivals → how often.
        cached_percent: share of the prompt that the engine found in its prefix cache → answered requests.
        hours: in which there was anything.
    """

    lengths: Mapping[tuple[int, int], int]
    concurrency: Mapping[int, int]
    gap_ms: Mapping[int, int]
    cached_percent: Mapping[int, int]
    hours: int

    @property
    def requests(self) -> int:
        """Answered."""
        return sum(self.lengths.values())


def read_profile(state_dir: Path, since_s: float = 0.0) -> Profile:
    """What was recorded since then.

    Raises:
        ApplianceError: nothing was recorded, or the file is none of ours.
    """
    path = state_dir / FILE
    if not path.exists():
        raise ApplianceError(f"{path}: no traffic has been recorded", hint="the gateway writes it while [metrics] traffic_days is not 0")
    since_hour = int(since_s // HOUR_S)
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as database:
            lengths = database.execute(
                "SELECT prompt, answer, SUM(count) FROM lengths WHERE hour >= ? GROUP BY prompt, answer", (since_hour,)
            ).fetchall()
            levels = database.execute(
                "SELECT kind, bucket, SUM(count) FROM levels WHERE hour >= ? GROUP BY kind, bucket", (since_hour,)
            ).fetchall()
            (hours,) = database.execute("SELECT COUNT(DISTINCT hour) FROM lengths WHERE hour >= ?", (since_hour,)).fetchone()
    except sqlite3.Error as error:
        raise ApplianceError(f"{path}: cannot be read ({error})", hint="delete it; the gateway begins a new one") from None
    kinds: dict[str, Counter[int]] = {CONCURRENCY: Counter(), GAP_MS: Counter(), CACHED_PERCENT: Counter()}
    for kind, bucket, count in levels:
        kinds.setdefault(kind, Counter())[bucket] += count
    shapes = {(prompt, answer): count for prompt, answer, count in lengths}
    return Profile(shapes, kinds[CONCURRENCY], kinds[GAP_MS], kinds[CACHED_PERCENT], hours)
