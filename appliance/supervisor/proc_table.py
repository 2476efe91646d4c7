"""Who runs, from /proc/*/stat. Read in one pass; everything else is a question to the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_DEAD_STATES = "ZX"


@dataclass(frozen=True, slots=True)
class ProcStat:
    """One process. `start_ticks` together with the pid names it for the whole boot."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    threads: int
    start_ticks: int
    resident_pages: int = 0

    @property
    def is_alive(self) -> bool:
        """Not yet a zombie. A leader whose first thread ended while others run looks like one, and is not."""
        return self.state not in _DEAD_STATES or self.threads > 1


def read_stat(pid: int, proc: Path = PROC) -> ProcStat | None:
    """None when there is no such process (any more)."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may contain anything, parentheses included.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return ProcStat(
        pid=pid,
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        resident_pages=int(fields[21]),
    )


def scan(proc: Path = PROC) -> tuple[ProcStat, ...]:
    """Everybody."""
    pids = (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return tuple(stat for pid in pids if (stat := read_stat(pid, proc)) is not None)


def working_directory(pid: int, proc: Path = PROC) -> str | None:
    """None of a process that is gone or a zombie."""
    try:
        return str((proc / str(pid) / "cwd").readlink())
    except OSError:
        return None


def describe(stats: Iterable[ProcStat]) -> str:
    """ "pid 12 (python, state D), pid 13 (nvcc, state R)" """
    return ", ".join(f"pid {stat.pid} ({stat.name}, state {stat.state})" for stat in stats)
