"""The traffic profile: what is counted, how long it is kept, and what a broken disk costs."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.errors import ApplianceError
from appliance.gateway.profile import Profiler
from appliance.traffic import FILE, HOUR_S, bound_of, bucket_of, read_profile

NOW_S = 1_800_000_000.0


class Clock:
    """Set by the test."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


async def written(profiler: Profiler) -> None:
    """As at the gateway's end."""
    task = asyncio.ensure_future(profiler.keep())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@given(st.floats(0, 1e9))
def test_a_value_is_in_its_bucket(value: float) -> None:
    """At least its bound, below the next one's."""
    bucket = bucket_of(value)
    assert bound_of(bucket) <= value * (1 + 1e-9)
    assert value < bound_of(bucket + 1) * (1 + 1e-9)


async def test_what_was_counted_is_read_back(tmp_path: Path) -> None:
    """Lengths together, arrivals, concurrency, what the prefix cache gave; over two writes and two hours."""
    clock = Clock()
    profiler = Profiler(tmp_path, 30, clock)
    profiler.arrived(10.0, 0)
    profiler.arrived(10.5, 3)
    profiler.answered(1000, 64, 500)
    profiler.answered(1000, 64, 0)
    await written(profiler)
    clock.now_s += HOUR_S
    profiler.answered(8, 2000, 0)
    profiler.answered(1000, 64, 0)
    await written(profiler)
    profile = read_profile(tmp_path)
    assert profile.lengths == {(bucket_of(1000), bucket_of(64)): 3, (bucket_of(8), bucket_of(2000)): 1}
    assert (profile.requests, profile.hours) == (4, 2)
    assert profile.concurrency == {0: 1, bucket_of(3): 1}
    assert profile.gap_ms == {bucket_of(500): 1}
    assert profile.cached_percent == {bucket_of(50): 1, 0: 3}
    assert read_profile(tmp_path, clock.now_s).requests == 2


async def test_what_is_old_goes(tmp_path: Path) -> None:
    """After the days of the configuration."""
    clock = Clock()
    profiler = Profiler(tmp_path, 2, clock)
    profiler.answered(10, 10, 0)
    await written(profiler)
    clock.now_s += 47 * HOUR_S
    profiler.answered(20, 20, 0)
    await written(profiler)
    assert read_profile(tmp_path).requests == 2
    clock.now_s += 3 * HOUR_S
    profiler.answered(30, 30, 0)
    await written(profiler)
    assert sorted(read_profile(tmp_path).lengths) == [(bucket_of(20), bucket_of(20)), (bucket_of(30), bucket_of(30))]


async def test_off_is_off(tmp_path: Path) -> None:
    """No file."""
    profiler = Profiler(tmp_path, 0, Clock())
    profiler.arrived(1.0, 1)
    profiler.answered(1, 1, 0)
    await written(profiler)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ApplianceError, match="no traffic has been recorded"):
        read_profile(tmp_path)


@pytest.mark.parametrize("content", [b"no database at all, and long enough to be looked at" * 50, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_broken_file_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    """And kept, for whoever wants to know why."""
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ApplianceError, match="cannot be read"):
        read_profile(tmp_path)
    profiler = Profiler(tmp_path, 30, Clock())
    profiler.answered(1, 1, 0)
    await written(profiler)
    assert read_profile(tmp_path).requests == 1
    assert (tmp_path / "traffic.broken").read_bytes() == content


async def test_a_folder_that_cannot_be_written_costs_the_profile_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, nothing raised, nothing kept in memory."""
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file", 30, Clock())
    for _ in range(3):
        profiler.answered(1, 1, 0)
        await written(profiler)
    assert caplog.text.count("cannot be written") == 1
    assert not profiler._counts


async def test_there_is_no_text_in_it(tmp_path: Path) -> None:
    """Only numbers, and the names of three kinds."""
    profiler = Profiler(tmp_path, 30, Clock())
    profiler.arrived(1.0, 1)
    profiler.arrived(2.0, 1)
    profiler.answered(100, 100, 50)
    await written(profiler)
    database = sqlite3.connect(tmp_path / FILE)
    values = {value for table in ("lengths", "levels") for row in database.execute(f"SELECT * FROM {table}") for value in row}
    database.close()
    assert {value for value in values if not isinstance(value, int)} == {"concurrency", "gap_ms", "cached_percent"}
