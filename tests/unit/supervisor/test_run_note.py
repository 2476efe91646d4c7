"""The note of a run, and what the next run makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance import diagnosis
from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.supervisor import proc_table
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.run_note import KEY, RunNote, Unclosed, about


def note_of(store: IncidentStore, pid: int, boot: str, **fields: object) -> None:
    """As that process would have left it."""
    stat = proc_table.read_stat(pid)
    ticks = stat.start_ticks if stat is not None else 1
    common = {"heard_s": time.time() - 60, "state": "serving", "generation": 3, "uptime_s": 5.0, "closed": False}
    store.keep(KEY, {"pid": pid, "start_ticks": ticks, "boot_id": boot} | common | fields)


def gone() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_first_run_and_a_closed_one_leave_nothing(tmp_path: Path) -> None:
    """Nor does a run that was told to end."""
    store = IncidentStore(tmp_path, 10)
    first = RunNote(store, "boot")
    assert first.unclosed is None
    first.write("serving", 1, answering=True)
    first.close()
    assert RunNote(store, "boot").unclosed is None
    store.close()


def test_the_time_that_it_served_is_not_the_wall_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set a day back while it serves would make it negative."""
    store = IncidentStore(tmp_path, 10)
    note = RunNote(store, "boot")
    note.write("serving", 1, answering=True)
    now_s = time.time()
    monkeypatch.setattr("appliance.supervisor.run_note.time.time", lambda: now_s - 86400)
    note.write("serving", 1, answering=True)
    assert 0 <= store.recall(KEY)["uptime_s"] < 3600
    store.close()


def test_a_run_that_nobody_closed(tmp_path: Path) -> None:
    """Its process is gone: what it wrote last is known."""
    store = IncidentStore(tmp_path, 10)
    note_of(store, gone(), "boot")
    unclosed = RunNote(store, "boot").unclosed
    assert unclosed is not None
    assert (unclosed.state, unclosed.generation, unclosed.uptime_s, unclosed.rebooted) == ("serving", 3, 5.0, False)
    store.close()


def test_one_that_lives_is_another_appliance(tmp_path: Path) -> None:
    """Two that share a state folder by mistake are not each other's accident; a number that was given anew is no sign of life."""
    store = IncidentStore(tmp_path, 10)
    note_of(store, os.getpid(), "boot")
    assert RunNote(store, "boot").unclosed is None
    note_of(store, os.getpid(), "boot", start_ticks=5)
    assert RunNote(store, "boot").unclosed is not None
    note_of(store, os.getpid(), "an earlier boot")
    found = RunNote(store, "boot").unclosed
    assert found is not None
    assert found.rebooted
    store.close()


def verdict(unclosed: Unclosed, *others: Evidence) -> Cause:
    """Of its evidence beside others'."""
    return diagnosis.diagnose([*others, unclosed.evidence(time.time())]).cause


def test_what_became_of_it_is_told_as_far_as_it_is_known() -> None:
    """Nothing beside the note; a boot since; the kernel's line about its number; systemd's watchdog and result."""
    ended = Unclosed(4711, time.time() - 10, "serving", 3, 5.0, rebooted=False, boot_id="boot")
    assert verdict(ended) is Cause.SUPERVISOR_DIED
    assert verdict(Unclosed(4711, time.time() - 10, "serving", 3, 5.0, rebooted=True, boot_id="old")) is Cause.HOST_POWER_RESET
    kill = Evidence(Source.KERNEL_LOG, "Out of memory: Killed process 4711 (applianced) total-vm:1kB", time.time() - 9)
    stranger = Evidence(Source.KERNEL_LOG, "Out of memory: Killed process 471 (postgres) total-vm:1kB", time.time() - 9)
    assert verdict(ended, *about(4711, [kill, stranger])) is Cause.HOST_OOM
    unit = "llm-appliance.service: "
    killed = [
        Evidence(Source.SYSTEMD, unit + words, time.time() - 9)
        for words in ("Main process exited, code=killed, status=9/KILL", "Failed with result 'signal'.")
    ]
    assert verdict(ended, *killed) is Cause.SUPERVISOR_DIED
    dog = [
        Evidence(Source.SYSTEMD, unit + words, time.time() - 9)
        for words in ("Watchdog timeout (limit 30s)!", "Main process exited, code=killed, status=6/ABRT")
    ]
    assert verdict(ended, *dog) is Cause.SD_WATCHDOG
