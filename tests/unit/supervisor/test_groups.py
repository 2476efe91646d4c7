"""Whose orphan it is, where two engines run side by side and systemd delegates no cgroup."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.supervisor import proc_table
from appliance.supervisor.groups import Groups, SessionGroup

_PR_SET_CHILD_SUBREAPER = 36
LEAVES_AN_ORPHAN = "(setsid sleep 600 >/dev/null 2>&1 &) ; exec sleep 600"


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans of our children fall to this process, as to applianced."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def started(groups: Groups, folder: Path) -> tuple[SessionGroup, subprocess.Popen[bytes], int]:
    """An engine whose helper has become an orphan: the group, the leader, the orphan's number."""
    folder.mkdir()
    group = groups.of_life(1)
    assert isinstance(group, SessionGroup)
    leader = subprocess.Popen(["sh", "-c", LEAVES_AN_ORPHAN], cwd=folder, start_new_session=True)
    group.started(leader.pid)
    end_s = time.monotonic() + 10
    while (orphan := next((pid for pid in _sleepers(folder) if pid != leader.pid), None)) is None:
        assert time.monotonic() < end_s, "no orphan came"
        time.sleep(0.01)
    return group, leader, orphan


def _sleepers(folder: Path) -> list[int]:
    """Children of ours in that folder that are sessions of their own."""
    found = (stat for stat in proc_table.scan() if stat.parent == os.getpid() and stat.session == stat.pid and stat.name == "sleep")
    return [stat.pid for stat in found if proc_table.working_directory(stat.pid) == str(folder)]


@pytest.mark.usefixtures("adopting")
def test_an_orphan_is_of_the_engine_whose_folder_it_is_in(tmp_path: Path) -> None:
    """Ending one engine takes its own orphan along and leaves the other's alone; when that is the last engine, what is left is its own."""
    whole = Groups(None, adopts_orphans=True)
    first, first_leader, first_orphan = started(whole.of_replica(0), tmp_path / "first")
    second, second_leader, second_orphan = started(whole.of_replica(1), tmp_path / "second")
    try:
        assert {stat.pid for stat in first.survivors()} == {first_leader.pid, first_orphan}
        first.kill()
        end_s = time.monotonic() + 10
        while first.survivors():
            assert time.monotonic() < end_s, "it does not end"
            time.sleep(0.01)
        first.remove()
        assert {stat.pid for stat in second.survivors()} == {second_leader.pid, second_orphan}
    finally:
        second.kill()
        while second.survivors():
            time.sleep(0.01)
        second.remove()
        for leader in (first_leader, second_leader):
            leader.wait(10)
