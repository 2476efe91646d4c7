"""When a load is a stall, and what counts as progress."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core.units import KIB, MIB
from appliance.supervisor import proc_table
from appliance.supervisor.loading import Vitals, begin, judge, looked
from appliance.supervisor.vitals import read_vitals

STALL_S = 30.0
AT_START = Vitals(moved_bytes=1000, memory_bytes=50 * MIB, cpu_s=1.0, lines=3, states="S")


@pytest.mark.parametrize(
    ("change", "fed"),
    [
        ({"moved_bytes": 1000 + 64 * KIB}, True),
        ({"memory_bytes": 51 * MIB}, True),
        ({"cpu_s": 2.0}, False),
        ({"lines": 4}, False),
    ],
)
def test_any_sign_of_life_is_progress(change: dict[str, float], fed: bool) -> None:
    """Bytes, memory, CPU time or words: each alone starts the time anew; the first two also feed the load."""
    now = replace(AT_START, **change)
    load = looked(begin(0.0, AT_START), 29.0, now, STALL_S)
    assert judge(load, 58.0, now, STALL_S) is None
    assert load.fed_s == (29.0 if fed else 0.0)
    stall = judge(looked(load, 60.0, now, STALL_S), 60.0, now, STALL_S)
    assert stall is not None
    assert "start_stall_s = 30" in str(stall)


@pytest.mark.parametrize("change", [{"moved_bytes": 1000 + 63 * KIB}, {"memory_bytes": 50 * MIB + 1000}, {"cpu_s": 1.9}])
def test_what_our_own_probes_cost_it_is_no_progress(change: dict[str, float]) -> None:
    """A heartbeat's bytes, a page, a second of CPU time in thirty."""
    now = replace(AT_START, **change)
    assert judge(looked(begin(0.0, AT_START), 31.0, now, STALL_S), 31.0, now, STALL_S) is not None


def test_small_steps_add_up() -> None:
    """Ten looks of 10 KiB each are a slow disk, not a stall."""
    load, now = begin(0.0, AT_START), AT_START
    for second in range(1, 100):
        now = replace(now, moved_bytes=now.moved_bytes + 10 * KIB)
        load = looked(load, float(second), now, STALL_S)
        assert judge(load, float(second), now, STALL_S) is None


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    """Only what was never in use before counts: a loop that allocates and frees would load for ever."""
    load = begin(0.0, AT_START)
    for second in range(1, 40):
        now = replace(AT_START, memory_bytes=(50 - second % 2) * MIB)
        load = looked(load, float(second), now, STALL_S)
    assert judge(load, 39.0, now, STALL_S) is not None


def test_a_helper_that_ends_hides_no_progress() -> None:
    """A compiler took its counters along: what the others do from then on counts in full."""
    load = looked(begin(0.0, replace(AT_START, moved_bytes=100 * MIB, cpu_s=50.0)), 1.0, AT_START, STALL_S)
    now = replace(AT_START, moved_bytes=AT_START.moved_bytes + 64 * KIB)
    assert looked(load, 20.0, now, STALL_S).moved_s == 20.0


def test_vitals_are_those_of_real_processes() -> None:
    """What a child reads, takes and computes is seen; one that is gone is nothing."""
    code = (
        "import pathlib, sys, time\n"
        "keep = bytearray(30 * 2**20)\n"
        "pathlib.Path(sys.executable).read_bytes()\n"
        "while time.process_time() < 0.3: pass\n"
        "print('done', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            stat = proc_table.read_stat(child.pid)
            assert stat is not None
            vitals = read_vitals([stat], 7)
            size_bytes = Path(sys.executable).stat().st_size
            assert vitals.moved_bytes >= size_bytes
            assert vitals.memory_bytes > 30 * MIB
            assert vitals.cpu_s >= 0.2
            assert vitals.lines == 7
            deadline_s = time.monotonic() + 5
            while proc_table.read_stat(child.pid).state != "S":  # type: ignore[union-attr]
                assert time.monotonic() < deadline_s
        finally:
            child.kill()
    assert read_vitals([stat], 0).moved_bytes == 0
