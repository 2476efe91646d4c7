"""Whose process a kernel line names: one that was ever of this engine life, a stranger, or not to be told from here.

The kernel writes the numbers and control groups of its outermost namespaces. Inside a container those are others than ours, and
nothing can be told; neither where the engine is a client of a container runtime, whose processes are nobody's children here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.supervisor.groups import Group, own_cgroup

_INITIAL = {"pid": "pid:[4026531836]", "cgroup": "cgroup:[4026531835]"}
"""include/linux/proc_ns.h: PROC_PID_INIT_INO, PROC_CGROUP_INIT_INO."""
_OOM = re.compile(
    r"(?:task_memcg=(?P<memcg>[^,]*),)?task=[^,]*,pid=(?P<pid>\d+)"
    r"|[Kk]ill(?:ed)? process (?P<victim>\d+) \(|reaped process (?P<reaped>\d+) "
)
_XID = re.compile(r"NVRM: Xid .{0,60}?pid='?(?P<pid>\d+)")
_THREAD = re.compile(r"\[(?P<thread>\d+)\]:? (?:segfault at|general protection|trap )")
_RUNTIMES = frozenset({"docker", "podman", "nerdctl", "ctr", "crictl", "kubectl", "machinectl", "lxc", "incus", "ssh"})


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Whether what we call a process or a control group is called so by the kernel too."""

    pids: bool
    cgroups: bool

    @classmethod
    def ours(cls) -> Namespaces:
        """Of this process."""
        return cls(*(_is_initial(kind) for kind in ("pid", "cgroup")))


def _is_initial(kind: str) -> bool:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink()) == _INITIAL[kind]
    except OSError:
        return False


class Kinship:
    """Answers for one engine life; keeps what the group knows when that is gone."""

    def __init__(self, group: Group, program: str, namespaces: Namespaces, vicinity: Callable[[], str | None] = own_cgroup) -> None:
        """`program`: the engine's; `vicinity`: the control group in which an engine without one of its own lives."""
        self._group = group
        self._names = {Path(program).name}
        self._namespaces = namespaces
        self._pids: frozenset[int] = frozenset()
        self._strangers: set[int] = set()
        self._cgroup = group.cgroup
        self._around = vicinity()

    def look(self) -> None:
        """Who is there now is remembered. One pass over /proc where the engine has no control group of its own."""
        with contextlib.suppress(OSError):  # its control group is gone, and with it whoever was in there
            self._names |= {stat.name for stat in self._group.survivors()} & _RUNTIMES
        self.note()

    def note(self) -> None:
        """Who was seen by anybody until now is remembered, also when the group is gone."""
        self._pids |= self._group.seen

    def of_engine(self, line: str) -> bool | None:
        """None: the line names nobody, or nobody here can tell."""
        killed = _OOM.search(line)
        if killed is not None:
            pid = int(killed["pid"] or killed["victim"] or killed["reaped"])
            kin = False if pid in self._strangers else self._killed(pid, killed["memcg"] or "")
            if kin is False:  # the kernel's other lines about it do not say where it was
                self._strangers.add(pid)
            return kin
        owner = _XID.search(line)
        if owner is not None:
            return self._is_kin(int(owner["pid"]), certain=True)
        thread = _THREAD.search(line)
        return self._is_kin(_process_of(int(thread["thread"])), certain=False) if thread is not None else None

    def _killed(self, pid: int, memcg: str) -> bool | None:
        if memcg and self._namespaces.cgroups and self._cgroup is not None:
            inside = _is_below(memcg, self._cgroup)
            return True if inside else self._is_kin(pid, certain=True)
        return self._is_kin(pid, certain=bool(memcg) and memcg != self._around)

    def _is_kin(self, pid: int, *, certain: bool) -> bool | None:
        """`certain`: a number that we never saw is a stranger's."""
        if not self._namespaces.pids:
            return None
        if pid in self._pids:
            return True
        return False if certain and self._pids and not self._names & _RUNTIMES else None


def _process_of(thread: int) -> int:
    """The process of a thread, while it is there."""
    try:
        status = Path(f"/proc/{thread}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return thread
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:")), thread)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
