"""Where a hung engine's threads are, by py-spy, where the engine's environment or the machine has it. Before it is ended."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from appliance.supervisor.core_dumps import run

DEADLINE_S = 5.0
LINES_MAX = 400
PROCESSES_MAX = 4


def py_spy_of(program: str) -> str | None:
    """The one beside the engine's own interpreter, else any."""
    beside = Path(program).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


async def stacks_of(program: str, pids: Sequence[int]) -> list[str]:
    """What it says of these processes; empty where there is none, or it may not look (kernel.yama.ptrace_scope)."""
    spy = py_spy_of(program)
    lines: list[str] = []
    for pid in pids[:PROCESSES_MAX] if spy is not None else ():
        said = await run((str(spy), "dump", "--nonblocking", "--pid", str(pid)), DEADLINE_S)
        lines += said.splitlines()
    return lines[:LINES_MAX]
