"""How much memory an engine on the CPU may still take, and how much it holds: by the machine, by its cgroups, by its own limits."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.core.units import KIB
from appliance.supervisor.proc_table import PROC

MEMORY = "the machine's memory"
ADDRESSES = "the engine's address space (RLIMIT_AS)"
DATA = "the engine's data limit (RLIMIT_DATA)"
CGROUPS = Path("/sys/fs/cgroup")
_HELD = ("RssAnon:", "RssShmem:", "VmSwap:")
"""What cannot be dropped and read again from a file. Mapped weights can."""
_LIMITS = ((ADDRESSES, resource.RLIMIT_AS, "VmSize:"), (DATA, resource.RLIMIT_DATA, "VmData:"))


@dataclass(frozen=True, slots=True)
class Look:
    """One moment.

    Attributes:
        free_bytes: by place that can run out: a card's address, or one of the names above.
        held_bytes: by the engine's processes; None on cards, where what is free tells.
    """

    free_bytes: Mapping[str, int]
    held_bytes: int | None = None


def look_at(pids: Sequence[int], proc: Path = PROC, cgroups: Path = CGROUPS) -> Look:
    """This moment, for an engine of these processes (the leader first)."""
    free: dict[str, int] = {}
    available = available_bytes(proc)
    if available is not None:
        free[MEMORY] = available
    held = 0
    for number, pid in enumerate(pids):
        status = _status(pid, proc)
        held += sum(status.get(name, 0) for name in _HELD)
        if number == 0:
            free.update(_own_limits(pid, status))
            free.update(cgroup_room(pid, proc, cgroups))
    return Look(free, held)


def available_bytes(proc: Path = PROC) -> int | None:
    """What the kernel says could be had without swapping; None where it does not say."""
    return _meminfo("MemAvailable:", proc)


def machine_bytes(proc: Path = PROC) -> int | None:
    """All of the machine's memory; None where the kernel does not say."""
    return _meminfo("MemTotal:", proc)


def _meminfo(name: str, proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * KIB
    return None


def room_before_start(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """What an engine that is started by this process may take: of the machine, and of the cgroups that it will be in."""
    found = [*cgroup_room(pid, proc, cgroups).values()]
    available = available_bytes(proc)
    return min([*found, available]) if available is not None else min(found, default=None)


def cgroup_room(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[str, int]:
    """By cgroup with a limit, from the process's own up: memory.max − memory.current + the file cache, which is given back when needed."""
    found: dict[str, int] = {}
    for path in _own_cgroups(pid, proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # without the memory controller there are no such files
            limit = (path / "memory.max").read_text().strip()
            if limit != "max":
                cached = sum(_numbers(path / "memory.stat").get(name, 0) for name in ("inactive_file", "active_file"))
                found[f"memory.max of {path.name or 'the root cgroup'}"] = int(limit) - int((path / "memory.current").read_text()) + cached
    return found


def _own_cgroups(pid: int, proc: Path, cgroups: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                path = cgroups / line[4:].lstrip("/")
                yield path
                yield from (parent for parent in path.parents if parent.is_relative_to(cgroups))


def _own_limits(pid: int, status: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number, used in _LIMITS:
        with contextlib.suppress(OSError):  # gone, or not ours
            soft, _ = resource.prlimit(pid, number)
            if soft != resource.RLIM_INFINITY and used in status:
                found[name] = soft - status[used]
    return found


def _status(pid: int, proc: Path) -> dict[str, int]:
    """The lines of /proc/PID/status that are sizes, in bytes; empty when it is gone."""
    with contextlib.suppress(OSError, ValueError):
        rows = (line.split() for line in (proc / str(pid) / "status").read_text().splitlines())
        return {row[0]: int(row[1]) * KIB for row in rows if len(row) == 3 and row[2] == "kB"}
    return {}


def _numbers(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}
