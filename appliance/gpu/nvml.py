"""Asking NVML through a child with a deadline.

A card in trouble makes NVML hang in the kernel, where SIGKILL does not reach (D state). So: never in our own process; one child that
lives on from question to question; one that does not answer in time is killed, never waited for, and no second one is started while
it is stuck. A card that is lost is never asked about again, and from then on no new child either: its start would touch every card.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_DEADLINE_S = 10.0
"""The first question initialises the cards, which takes seconds without persistence mode."""
DEADLINE_S = 2.0
RETRY_FIRST_S = 5.0
RETRY_MAX_S = 300.0
"""After a child that hung: the wait before the next one doubles up to this."""
KILL_GRACE_S = 0.2
ANSWER_MAX_BYTES = 1024**2
GPU_IS_LOST = 15
COMMAND = (sys.executable, "-m", "appliance.gpu.nvml_child")


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One card as NVML sees it; `problem` where it answered with an error, whose number is `code`."""

    address: str = ""
    uuid: str = ""
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    used_bytes: int = 0
    persistence: bool | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Lanes in use now: an idle card may have slept some away."""
    pcie_replays: int | None = None
    """Packets sent again since the driver was loaded: a link with a bad riser counts up."""
    nvlinks: int | None = None
    """NVLink connections that were up when the child began; None where it has none, or the driver does not say."""
    problem: str | None = None
    code: int = 0
    processes: tuple[int, ...] = ()
    """Who has memory of it, where that was asked."""


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """One answer. `code`: NVML's own error number of what failed first, 0 for none, -1 for a fault of the child."""

    code: int = 0
    problem: str = ""
    hung: bool = False
    driver: str = ""
    gpus: tuple[NvmlGpu, ...] = field(default=())

    @property
    def used_bytes(self) -> int:
        """Memory in use on all cards that answered."""
        return sum(gpu.used_bytes for gpu in self.gpus)

    @property
    def lost(self) -> tuple[str, ...]:
        """Cards that the driver itself calls lost."""
        return tuple(gpu.address for gpu in self.gpus if gpu.code == GPU_IS_LOST and gpu.address)


class NvmlReader:
    """Owns the child, and the stuck one, if there is one. One question at a time; never raises."""

    def __init__(
        self, command: Sequence[str] = COMMAND, *, first_deadline_s: float = FIRST_DEADLINE_S, deadline_s: float = DEADLINE_S
    ) -> None:
        self._command = tuple(command)
        self._first_deadline_s = first_deadline_s
        self._deadline_s = deadline_s
        self._child: asyncio.subprocess.Process | None = None
        self._stuck: asyncio.subprocess.Process | None = None
        self._answered = False
        self.left: frozenset[str] = frozenset()
        """Cards that are not asked about."""
        self._questions = 0
        self._hangs = 0
        self._not_before_s = 0.0
        self._turn = asyncio.Lock()

    @property
    def problem(self) -> str | None:
        """Why nothing can be asked now; None where something can."""
        if self._stuck is not None and self._stuck.returncode is None:
            return f"NVML is stuck: its child {_words(self._stuck.pid)} survives SIGKILL"
        if self._child is None and self.left:
            return f"NVML is not asked any more in this boot: {', '.join(sorted(self.left))} is lost, and a new start would touch it"
        wait_s = self._not_before_s - time.monotonic()
        return f"NVML hung and is not asked for another {wait_s:.0f} s" if wait_s > 0 else None

    @property
    def _patience_s(self) -> float:
        return self._deadline_s if self._answered else self._first_deadline_s

    async def ask(self, *, processes: bool = False) -> NvmlReport:
        """Never takes longer than the deadline, except behind another question."""
        async with self._turn:
            problem = self.problem
            if problem is not None:
                return NvmlReport(hung=True, problem=problem)
            self._stuck = None
            try:
                child = self._child or await self._start()
                async with asyncio.timeout(self._patience_s):
                    answer = await self._exchange(child, processes)
            except TimeoutError:
                return await self._abandon()
            except OSError as error:
                return NvmlReport(code=-1, problem=f"the NVML child cannot be started: {error}")
            return await self._heard(read_report(answer))

    async def close(self) -> None:
        """End the child; a stuck one stays what it is."""
        child, self._child = self._child, None
        if child is not None:
            self._stuck = child  # until it is seen to be gone
            await _end(child)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._answered = False
        self._child = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, stderr=null, limit=ANSWER_MAX_BYTES)
        return self._child

    async def _exchange(self, child: asyncio.subprocess.Process, processes: bool) -> bytes:
        assert child.stdin is not None
        assert child.stdout is not None
        self._questions += 1
        number = self._questions
        with contextlib.suppress(ConnectionError):  # it is dead: then its output has ended, and that is the answer
            question = {"number": number, "leave": sorted(self.left), "processes": processes}
            child.stdin.write(json.dumps(question).encode() + b"\n")
            await child.stdin.drain()
        while True:
            try:
                answer = await child.stdout.readline()
            except ValueError:
                return b""  # longer than any answer
            if not _is_of_earlier(answer, number):
                return answer

    async def _heard(self, report: NvmlReport) -> NvmlReport:
        """A child that cannot ask, or whose cards all fail, is of no more use: the next question starts another, if it may."""
        useless = report.code != 0 or (bool(report.gpus) and all(gpu.problem is not None for gpu in report.gpus))
        if report.code == -1 or (useless and not self.left):
            await self.close()
        self._answered, self._hangs = True, 0
        return report

    async def _abandon(self) -> NvmlReport:
        child, self._child = self._child, None
        assert child is not None
        # Before anything is waited for: who asked may be cancelled here, and a child that is forgotten would get a second one beside it.
        self._stuck = child
        self._hangs += 1
        self._not_before_s = time.monotonic() + min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (self._hangs - 1))
        await _end(child)
        return NvmlReport(hung=True, problem=f"NVML gave no answer within {self._patience_s:g} s")


async def _end(child: asyncio.subprocess.Process) -> None:
    """SIGKILL, and KILL_GRACE_S for it to work; whoever is in the kernel by then is not waited for."""
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_GRACE_S):
            await child.wait()


def read_report(answer: bytes) -> NvmlReport:
    """The child's one line of JSON; anything else is an error of the child."""
    try:
        document: Mapping[str, Any] = json.loads(answer)
        gpus = tuple(_gpu_of(gpu) for gpu in document.get("gpus", ()))
        return NvmlReport(int(document["code"]), str(document["problem"]), False, sys.intern(str(document.get("driver", ""))), gpus)
    except (ValueError, TypeError, KeyError, AttributeError):
        return NvmlReport(code=-1, problem=f"the NVML child died or said {answer[:100]!r}")


def _gpu_of(told: Mapping[str, Any]) -> NvmlGpu:
    """A card's words are the same each second, and a quarter of an hour of them is kept: they are kept once."""
    words = {name: sys.intern(told[name]) for name in ("address", "uuid", "name") if name in told}
    return NvmlGpu(**{**told, **words, "processes": tuple(told.get("processes", ()))})


def _is_of_earlier(answer: bytes, number: int) -> bool:
    """Whether it answers a question that nobody waits for any more."""
    with contextlib.suppress(ValueError, AttributeError):
        return bool(json.loads(answer).get("number", number) < number)
    return False


def _words(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} in state {text[text.rindex(')') + 2 :].split()[0]}"
