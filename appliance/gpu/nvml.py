"""Asking NVML from a child with a deadline.

A card in trouble makes NVML hang in the kernel, where SIGKILL does not reach (D state). So: never in our own process, one
question a child, at most one stuck child, and no second question while it is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 10.0
"""The first call initialises the card, which takes seconds without persistence mode."""


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One card as NVML sees it; `problem` where it answered with an error."""

    pci_bus_id: str = ""
    uuid: str = ""
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    persistence: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """One answer. `code`: NVML's own error number of what failed first, 0 for none."""

    code: int = 0
    problem: str = ""
    hung: bool = False
    driver: str = ""
    gpus: tuple[NvmlGpu, ...] = field(default=())


class NvmlProbe:
    """Owns the stuck child, if there is one."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "appliance.gpu.nvml_child"), deadline_s: float = DEADLINE_S) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._stuck: asyncio.subprocess.Process | None = None

    async def ask(self) -> NvmlReport:
        """Never raises, never takes longer than the deadline."""
        if self._stuck is not None and self._stuck.returncode is None:
            return NvmlReport(hung=True, problem=f"NVML is stuck: its child {_words(self._stuck.pid)} survives SIGKILL")
        self._stuck = None
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            return NvmlReport(code=-1, problem=f"the NVML child cannot be started: {error}")
        try:
            async with asyncio.timeout(self._deadline_s):
                answer, _ = await child.communicate()
        except TimeoutError:
            return await self._abandon(child)
        return read_report(answer)

    async def _abandon(self, child: asyncio.subprocess.Process) -> NvmlReport:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await child.wait()
        if child.returncode is None:
            self._stuck = child
        return NvmlReport(hung=True, problem=f"NVML gave no answer within {self._deadline_s:g} s")


def read_report(answer: bytes) -> NvmlReport:
    """The child's one line of JSON; anything else is an error of the child."""
    try:
        document: Mapping[str, Any] = json.loads(answer)
        gpus = tuple(NvmlGpu(**gpu) for gpu in document.get("gpus", ()))
        return NvmlReport(int(document["code"]), str(document["problem"]), False, str(document.get("driver", "")), gpus)
    except (ValueError, TypeError, KeyError, AttributeError):
        return NvmlReport(code=-1, problem=f"the NVML child died or said {answer[:100]!r}")


def _words(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} in state {text[text.rindex(')') + 2 :].split()[0]}"
