"""Reading the vitals of an engine life from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from appliance.supervisor.loading import Vitals
from appliance.supervisor.proc_table import PROC, ProcStat

_COUNTED = ("rchar:", "wchar:", "read_bytes:")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def read_vitals(members: Iterable[ProcStat], lines: int, proc: Path = PROC) -> Vitals:
    """Of these processes, and so many lines of their log."""
    everybody = tuple(members)
    return Vitals(
        moved_bytes=sum(_moved_bytes(stat.pid, proc) for stat in everybody),
        memory_bytes=sum(stat.resident_pages for stat in everybody) * _PAGE_BYTES,
        cpu_s=sum(stat.cpu_ticks for stat in everybody) / _TICKS_A_SECOND,
        lines=lines,
        states="".join(sorted({stat.state for stat in everybody})),
    )


def _moved_bytes(pid: int, proc: Path) -> int:
    """0 where it is gone, or of another user: then memory, CPU and log have to tell."""
    with contextlib.suppress(OSError, ValueError):
        words = (proc / str(pid) / "io").read_text().split()
        return sum(int(value) for name, value in zip(words[::2], words[1::2], strict=True) if name in _COUNTED)
    return 0
