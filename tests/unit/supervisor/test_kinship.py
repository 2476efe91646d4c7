"""Whose process a kernel line names, told by real processes' numbers."""

# ruff: noqa: E501 (kernel lines are quoted as they are printed)

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from appliance.supervisor.groups import SessionGroup
from appliance.supervisor.kinship import Kinship, Namespaces
from appliance.supervisor.proc_table import ProcStat

HOST = Namespaces(pids=True, cgroups=True)
OOM = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={group},task_memcg={group},task={name},pid={pid},uid=0"


@dataclass
class Boxed:
    """A group that has a control group of its own."""

    pids: frozenset[int]
    cgroup: str | None = "/system.slice/llm-appliance.service/engine-3"

    def survivors(self) -> tuple[ProcStat, ...]:
        """Nobody is left."""
        return ()

    @property
    def seen(self) -> frozenset[int]:
        """Everybody who was."""
        return self.pids


@pytest.fixture
def family() -> Iterator[tuple[SessionGroup, int, int]]:
    """A leader and its child, real ones: the group, both numbers."""
    code = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    group = SessionGroup()
    group.started(leader.pid)
    yield group, leader.pid, int(leader.stdout.readline())
    group.kill()
    leader.wait()


def test_a_child_that_is_dead_is_still_kin(family: tuple[SessionGroup, int, int]) -> None:
    """The kernel's line is read after the death it tells of."""
    group, leader, child = family
    kin = Kinship(group, "/usr/bin/python3", HOST, lambda: "/user.slice")
    kin.look()
    group.kill()
    for pid in (leader, child):
        assert kin.of_engine(OOM.format(group="/user.slice/x.scope", name="python3", pid=pid)) is True
        assert kin.of_engine(f"Memory cgroup out of memory: Killed process {pid} (python3) total-vm:1kB") is True
    assert kin.of_engine(f"pt_main_thread[{leader}]: segfault at 0 ip 0 sp 0 error 4") is True


def test_a_stranger_of_the_same_name_is_none(family: tuple[SessionGroup, int, int]) -> None:
    """A notebook in another control group is called python3 too; one in our own may be a child that nobody saw."""
    group, _leader, _child = family
    kin = Kinship(group, "/usr/bin/python3", HOST, lambda: "/user.slice/ours.scope")
    kin.look()
    assert kin.of_engine(OOM.format(group="/docker/9b", name="python3", pid=os.getpid())) is False
    assert kin.of_engine(f"Memory cgroup out of memory: Killed process {os.getpid()} (python3) total-vm:1kB") is False
    assert kin.of_engine(OOM.format(group="/user.slice/ours.scope", name="python3", pid=os.getppid())) is None
    assert kin.of_engine(f"Out of memory: Killed process {os.getppid()} (python3) total-vm:1kB") is None
    assert kin.of_engine(f"NVRM: Xid (PCI:0000:01:00): 31, pid={os.getpid()}, name=python3, Ch 8") is False
    assert kin.of_engine("NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.") is None


def test_a_control_group_of_its_own_settles_it() -> None:
    """Whoever was killed below it was the engine's, whatever number it had."""
    kin = Kinship(Boxed(frozenset({10})), "python3", HOST, lambda: "/system.slice/llm-appliance.service/supervisor")
    kin.look()
    assert kin.of_engine(OOM.format(group="/system.slice/llm-appliance.service/engine-3", name="x", pid=99)) is True
    assert kin.of_engine(OOM.format(group="/system.slice/llm-appliance.service/engine-31", name="x", pid=99)) is False


@pytest.mark.parametrize(("program", "namespaces"), [("/usr/bin/docker", HOST), ("python3", Namespaces(pids=False, cgroups=False))])
def test_nothing_is_told_from_inside_or_through_a_container_runtime(program: str, namespaces: Namespaces) -> None:
    """Numbers and control groups of the host are not those that are seen from here."""
    kin = Kinship(Boxed(frozenset({10}), None), program, namespaces, lambda: "/")
    kin.look()
    assert kin.of_engine(OOM.format(group="/docker/9b", name="python3", pid=99)) is None
