"""All processes of one engine life, so that they can be ended together: by cgroup where systemd delegates one, else by session.

A pid is a number that the kernel reuses. What is signalled here is a cgroup, a process group whose leader is not reaped
yet (so its number cannot be reused), or a pidfd that was checked after it was opened.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from appliance.supervisor import proc_table
from appliance.supervisor.proc_table import ProcStat

ENGINE, SPARE, HOLDER = "engine", "spare", "weights"
"""How cgroups are called, with a number behind."""


class Group(Protocol):
    """The processes of one engine life."""

    def join(self) -> None:
        """Called in the child, between fork and exec."""

    def started(self, pid: int) -> None:
        """The leader: our child, in a session of its own, not reaped before remove()."""

    def becomes_engine(self) -> None:
        """Its leader was a spare and is an engine from here on."""

    def kill(self) -> None:
        """SIGKILL to everybody; doing it again does no harm."""

    def survivors(self) -> tuple[ProcStat, ...]:
        """Who is still there."""

    def oom_kills(self) -> int | None:
        """How often the kernel's OOM killer struck here; None where that is not counted."""

    @property
    def seen(self) -> frozenset[int]:
        """The numbers of all that survivors() ever found, the dead included."""

    @property
    def cgroup(self) -> str | None:
        """The control group that is this group's alone, as the kernel writes it; None where it has none."""

    def remove(self) -> None:
        """Nobody is left."""


@dataclass(slots=True)
class Leaders:
    """Of all groups of this applianced, shared by them, so that none takes another's leader for its orphan. `engines`: of those that may
    have orphans; a spare has none, and what looks like one is an engine's."""

    everybody: set[int] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)


class SessionGroup:
    """The leader's session and process group, its descendants, and orphans of them that fell to us as their subreaper.

    Beside another engine an orphan is of the one whose working directory it has: each has a folder of its own.
    """

    def __init__(self, *, adopts_orphans: bool = False, leaders: Leaders | None = None, is_spare: bool = False) -> None:
        self._leader: ProcStat | None = None
        self._folder: str | None = None
        self._leaders = leaders if leaders is not None else Leaders()
        self._seen: set[tuple[int, int]] = set()
        self._adopts_orphans = adopts_orphans
        self._adopter = os.getpid() if adopts_orphans and not is_spare else None
        self._own_session = os.getsid(0)

    def join(self) -> None:
        """start_new_session has done it."""

    def started(self, pid: int) -> None:
        """Its session is the group."""
        self._leader = proc_table.read_stat(pid)
        self._folder = proc_table.working_directory(pid)
        self._leaders.everybody.add(pid)
        if self._adopter is not None:
            self._leaders.engines.add(pid)
        if self._leader is not None:
            self._seen.add((pid, self._leader.start_ticks))

    def becomes_engine(self) -> None:
        """It answers for orphans."""
        self._adopter = os.getpid() if self._adopts_orphans else None
        if self._adopter is not None and self._leader is not None:
            self._leaders.engines.add(self._leader.pid)

    def kill(self) -> None:
        """The group by its number; those who left it, one by one."""
        if self._leader is None:
            return
        # Looked up first: once its parent is dead, a member in a session of its own cannot be told from a stranger.
        strays = [stat for stat in self.survivors() if stat.group != self._leader.pid]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leader.pid, signal.SIGKILL)
        for stat in strays:
            _kill_checked(stat)

    def survivors(self) -> tuple[ProcStat, ...]:
        """One pass over /proc."""
        if self._leader is None:
            return ()
        everybody = proc_table.scan()
        members = {stat.pid for stat in everybody if self._is_member(stat, self._leader)}
        size = -1
        while len(members) > size:  # children of members that moved to sessions of their own
            size = len(members)
            members |= {stat.pid for stat in everybody if stat.parent in members}
        found = tuple(stat for stat in everybody if stat.pid in members)
        self._seen |= {(stat.pid, stat.start_ticks) for stat in found}
        self._reap_adopted(found)
        return tuple(stat for stat in found if stat.is_alive)

    def oom_kills(self) -> int | None:
        """The kernel log tells instead."""
        return None

    @property
    def seen(self) -> frozenset[int]:
        """Since the leader was started."""
        return frozenset(pid for pid, _start_ticks in self._seen)

    @property
    def cgroup(self) -> str | None:
        """It shares ours."""
        return None

    def remove(self) -> None:
        """From here on the leader may be reaped."""
        if self._leader is not None:
            self._leaders.everybody.discard(self._leader.pid)
            self._leaders.engines.discard(self._leader.pid)
        self._leader = None
        self._seen.clear()

    def _is_member(self, stat: ProcStat, leader: ProcStat) -> bool:
        if leader.pid in (stat.session, stat.group) or (stat.pid, stat.start_ticks) in self._seen:
            return True
        # Helpers that we started ourselves stay in our session; nobody of an engine's can get into it.
        adopted = stat.parent == self._adopter and stat.session != self._own_session and stat.pid not in self._leaders.everybody
        return adopted and stat.start_ticks >= leader.start_ticks and self._is_of_ours(stat, leader)

    def _is_of_ours(self, orphan: ProcStat, leader: ProcStat) -> bool:
        if self._leaders.engines <= {leader.pid}:
            return True
        return proc_table.working_directory(orphan.pid) in (None, self._folder)  # None: a zombie, which anybody may reap

    def _reap_adopted(self, found: tuple[ProcStat, ...]) -> None:
        for stat in found:
            adopted = stat.parent == os.getpid() and self._leader is not None and stat.pid != self._leader.pid
            if adopted and not stat.is_alive:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stat.pid, os.WNOHANG)


def _kill_checked(stat: ProcStat) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        pidfd = os.pidfd_open(stat.pid)
        try:
            now = proc_table.read_stat(stat.pid)
            if now is not None and now.start_ticks == stat.start_ticks:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


class CgroupGroup:
    """One cgroup (v2) of its own: nobody leaves it, and `cgroup.kill` ends all of it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[int] = set()
        self._path.mkdir(exist_ok=True)
        self._procs = os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def join(self) -> None:
        """ "0" is whoever writes it."""
        os.write(self._procs, b"0")

    def started(self, pid: int) -> None:
        """It has joined by itself."""
        self._seen.add(pid)

    def becomes_engine(self) -> None:
        """It stays where it is."""

    def kill(self) -> None:
        """Linux 5.14 and later; atomic, also against forks."""
        (self._path / "cgroup.kill").write_text("1")

    def survivors(self) -> tuple[ProcStat, ...]:
        """Zombies do not count as populated."""
        if "populated 0" in (self._path / "cgroup.events").read_text():
            return ()
        pids = [int(word) for word in (self._path / "cgroup.procs").read_text().split()]
        self._seen.update(pids)
        return tuple(stat for pid in pids if (stat := proc_table.read_stat(pid)) is not None and stat.is_alive)

    def oom_kills(self) -> int | None:
        """`oom_kill` of memory.events, where the memory controller is delegated too."""
        with contextlib.suppress(OSError):
            for line in (self._path / "memory.events").read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None

    @property
    def seen(self) -> frozenset[int]:
        """Since it was made."""
        return frozenset(self._seen)

    @property
    def cgroup(self) -> str | None:
        """Below the mount point."""
        mount = _cgroup2_mount()
        return f"/{self._path.relative_to(mount)}" if mount is not None and self._path.is_relative_to(mount) else None

    def remove(self) -> None:
        """An empty cgroup is a directory."""
        os.close(self._procs)
        with contextlib.suppress(OSError):
            self._path.rmdir()


class Delegation:
    """The cgroup that systemd delegated to this unit (Delegate=yes), made ready: we sit in a leaf, engines get siblings of it."""

    LEAF = "supervisor"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left: tuple[Path, ...] = ()

    @classmethod
    def find(cls, mount: Path | None = None) -> Delegation | None:
        """Ours, if there is one and it can be used. Moves this process into the leaf; never touches a cgroup that is not ours."""
        root = mount or _cgroup2_mount()
        own = own_cgroup()
        if root is None or own is None:
            return None
        path = root / own.lstrip("/")
        try:
            # systemd marks what it delegates; without the mark, root could write anywhere and would break its neighbours.
            if os.getxattr(path, "user.delegate") != b"1":
                return None
            return cls(path)._settle()
        except OSError:
            return None

    def group(self, kind: str, name: str) -> CgroupGroup:
        """A new cgroup for one engine life, spare (which keeps it when it becomes an engine) or weight holder. Raises OSError."""
        return CgroupGroup(self._path / f"{kind}-{name}")

    def left_behind(self) -> str:
        """Who is still there of an applianced that was killed; empty once they are gone."""
        self._left = tuple(path for path in self._left if not _removed(path))
        return ", ".join(filter(None, (proc_table.describe(_living(path)) for path in self._left)))

    def _settle(self) -> Delegation:
        self._clear_left_behind()
        leaf = self._path / self.LEAF
        leaf.mkdir(exist_ok=True)
        for word in (self._path / "cgroup.procs").read_text().split():
            (leaf / "cgroup.procs").write_text(word)
        with contextlib.suppress(OSError):  # the controller may not be available: then nobody counts OOM kills for us
            (self._path / "cgroup.subtree_control").write_text("+memory")
        return self

    def _clear_left_behind(self) -> None:
        """Of an applianced that was killed: nobody of its engines may live on beside ours, and empty cgroups are not to pile up."""
        self._left = tuple(path for kind in (ENGINE, SPARE, HOLDER) for path in self._path.glob(f"{kind}-*"))
        for path in self._left:
            with contextlib.suppress(OSError):
                (path / "cgroup.kill").write_text("1")


def _removed(path: Path) -> bool:
    """A cgroup that somebody is in cannot be."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _living(path: Path) -> tuple[ProcStat, ...]:
    with contextlib.suppress(OSError):
        pids = (int(word) for word in (path / "cgroup.procs").read_text().split())
        return tuple(stat for pid in pids if (stat := proc_table.read_stat(pid)) is not None)
    return ()


class Groups:
    """Makes the groups of this applianced's engines and spares: cgroups where systemd delegates them, else sessions."""

    def __init__(self, delegation: Delegation | None, *, adopts_orphans: bool) -> None:
        self._delegation = delegation
        self._adopts_orphans = adopts_orphans
        self._leaders = Leaders()
        self._of = ""

    def of_replica(self, index: int) -> Groups:
        """Those of one engine of several, which count their lives apart."""
        narrowed = copy.copy(self)
        narrowed._of = f"{index}."
        return narrowed

    @property
    def delegated(self) -> bool:
        """Whether each engine has a cgroup."""
        return self._delegation is not None

    def left_behind(self) -> str:
        """See Delegation; where none is, nobody knows."""
        return self._delegation.left_behind() if self._delegation is not None else ""

    def of_life(self, generation: int) -> Group:
        """For one engine life."""
        return self._cgroup(ENGINE, generation) or SessionGroup(adopts_orphans=self._adopts_orphans, leaders=self._leaders)

    def of_spare(self, number: int) -> Group:
        """For one spare."""
        return self._cgroup(SPARE, number) or self._beside()

    def of_holder(self, number: int) -> Group:
        """For one weight holder."""
        return self._cgroup(HOLDER, number) or self._beside()

    def _cgroup(self, kind: str, number: int) -> Group | None:
        if self._delegation is not None:
            with contextlib.suppress(OSError):
                return self._delegation.group(kind, f"{self._of}{number}")
        return None

    def _beside(self) -> Group:
        return SessionGroup(adopts_orphans=self._adopts_orphans, leaders=self._leaders, is_spare=True)


def own_cgroup() -> str | None:
    """Of this process, in the one hierarchy (v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def _cgroup2_mount() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    return None
