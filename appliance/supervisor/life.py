"""One engine life: the process, its log, its prober and its proof, from spawn to the empty group. Turns findings into events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from appliance.backends import ProofRequest
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.supervisor import events as ev
from appliance.supervisor.core_dumps import Death
from appliance.supervisor.evidence_desk import EvidenceDesk
from appliance.supervisor.groups import Group
from appliance.supervisor.hang import Hang
from appliance.supervisor.kinship import Kinship, Namespaces
from appliance.supervisor.life_watch import LifeWatch, Watched
from appliance.supervisor.loading import Stall
from appliance.supervisor.log_ring import LogLine, LogRing
from appliance.supervisor.probe import Counters, Listener, Prober, ProbeSettings, prove
from appliance.supervisor.process import EngineProcess, ExitStatus, spawn
from appliance.supervisor.py_spy import stacks_of
from appliance.supervisor.spare import SURVIVE_S, Spare
from appliance.supervisor.vitals import read_vitals

TAKE_OVER_S = 5.0
"""A spare that was told which life it is and does not serve by then is ended, and a process is started instead."""

log = structlog.get_logger()
Post = Callable[[ev.Event], None]
Start = Callable[[Coroutine[Any, Any, None], str, ev.Event | None], asyncio.Task[None]]
"""Run a coroutine; if it fails by a defect of ours, the event is posted so that the machine does not wait for ever."""


def _log_line(generation: int, line: LogLine) -> None:
    log.info(line.text, engine=generation)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every life of one applianced shares.

    Attributes:
        fatal: diagnosis's quick test of a fresh line.
        log: where the engine's lines go beside the ring.
    """

    desk: EvidenceDesk
    post: Post
    start: Start
    fatal: Callable[[str], str | None]
    log: Callable[[int, LogLine], None] = _log_line
    namespaces: Namespaces = field(default_factory=Namespaces.ours)


class EngineLife:
    """Owns one EngineProcess. `begin` starts it; nothing of it is used once `finish` was called."""

    def __init__(self, generation: int, spec: LaunchSpec, around: Surroundings) -> None:
        self.generation = generation
        self.spec = spec
        self._desk = around.desk
        self._post = around.post
        self._start = around.start
        self._around = around
        self._process: EngineProcess | None = None
        self._prober: Prober | None = None
        self._probing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._proving: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ring: LogRing | None = None
        self._our_signals: set[str] = set()
        self._lines_told = 0
        self._watch_outside: LifeWatch | None = None
        self._kin: Kinship | None = None
        self.death: Death | None = None
        """Of its leader, by a signal."""
        self.counters: Counters | None = None
        """As it said last."""
        self._unwanted = False
        self._settled = asyncio.Event()  # cleared while a spare takes over: until it serves or is gone
        self._settled.set()

    def begin(
        self, group: Callable[[], Group], ring: LogRing, probes: ProbeSettings, fallback: EngineLimits, spare: Spare | None = None
    ) -> None:
        """Spawn and watch, or let the spare become it. Posts SpawnFailed when there is nothing to watch."""
        self._group, self._ring, self._probes, self._fallback = group, ring, probes, fallback
        for note in self.spec.notes:
            log.warning(note, generation=self.generation)
        if spare is None:
            self._spawn(ring)
        else:
            self._settled.clear()
            self._watch(spare.hand_over(ring, self._on_lines, self._on_exit))
            defect = ev.HangDetected(self.generation, "our take-over by the spare failed by a defect")
            self._start(self._take_over(spare, ring), "take-over", defect)

    def _spawn(self, ring: LogRing) -> None:
        try:
            process = spawn(self.spec, self._group(), ring, self._on_lines, self._on_exit)
        except OSError as error:
            text = f"{self.spec.argv[0]} cannot be started: {error.strerror or error}"
            self._desk.add_spawn_failure(self.spec.argv[0], "engine.python" if self.spec.engine == "native" else "engine.command", error)
            self._post(ev.SpawnFailed(self.generation, text))
        else:
            self._watch(process)
            log.info("the engine was started", generation=self.generation, pid=self.pid, argv=" ".join(self.spec.argv))

    def _watch(self, process: EngineProcess) -> None:
        self._process = process
        self._kin = Kinship(process.group, self.spec.argv[0], self._around.namespaces)
        self._kin.note()
        self._desk.know(self._kin)
        listener = Listener(ready=self._on_ready, progress=self._on_progress, hung=self._on_hang, ending=self._on_ending)
        self._prober = Prober(self.spec, self._probes, self._fallback, process.cpu_s, listener, lambda: process.is_unread)
        self._probing = self._start(self._prober.run(), "prober", ev.HangDetected(self.generation, "our prober failed by a defect"))
        self._look_from_outside(process)

    async def _take_over(self, spare: Spare, ring: LogRing) -> None:
        """A spare that fails here was never an engine that anybody saw: a process is started in its place, in the same life."""
        began_s, process = time.monotonic(), self._process
        assert process is not None, "it was just handed over"
        problem = await self._how_it_failed(spare, process)
        if problem is None:
            log.info("the warm spare took over", generation=self.generation, pid=process.pid, took_s=round(time.monotonic() - began_s, 3))
        if problem is None or self._unwanted:
            return
        log.warning(f"starting the engine cold because the warm spare {problem}", generation=self.generation, pid=process.pid)
        self._stop_probing()
        if await process.end(SURVIVE_S) is not None:  # it knows whose life it is: as good as an engine, and not to be doubled
            self.kill(ev.KillHow.NOW, SURVIVE_S)
        elif not self._unwanted:
            process.close()
            self._settled.set()
            self._spawn(ring)

    async def _how_it_failed(self, spare: Spare, process: EngineProcess) -> str | None:
        if not await spare.tell(self.spec):
            return f"{process.exit}" if process.exit is not None else "did not take over when it was told"
        with contextlib.suppress(TimeoutError):
            # What has to load its weights still may take as long as any other start; the start deadline is the machine's.
            async with asyncio.timeout(TAKE_OVER_S if spare.mapped else None):
                await self._settled.wait()
        if process.exit is not None:
            return f"{process.exit}"
        return None if self._settled.is_set() else f"did not serve within {TAKE_OVER_S:g} s"

    @property
    def pid(self) -> int | None:
        """Of the leader."""
        return self._process.pid if self._process is not None else None

    @property
    def lines(self) -> tuple[LogLine, ...]:
        """What it said, all that is in the pipe included; still there when the process is not."""
        if self._process is not None:
            self._process.drain_output()
        return self._ring.lines if self._ring is not None else ()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, the leader first; empty when they are gone."""
        if self._process is None:
            return ()
        others = (stat.pid for stat in self._process.members() if stat.pid != self._process.pid)
        return (self._process.pid, *others)

    def hurry(self) -> None:
        """A drain waits for it to become idle."""
        self._stop_proving()
        if self._prober is not None:
            self._prober.hurry()

    def prove(self, requests: tuple[ProofRequest, ...], then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answers with ProofFailed, or leaves the rest to `then`."""

        async def run() -> None:
            problem = await prove(self.spec, requests, self.spec.start_deadline_s)
            if problem is None:
                await then()
            else:
                self._desk.add_failed_start(f"the proof failed: {problem}")
                self._post(ev.ProofFailed(self.generation, f"its first completion failed: {problem}"))

        self._proving = self._start(run(), "proof", ev.ProofFailed(self.generation, "our proof failed by a defect"))

    def follow(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Something beside it, for as long as it is wanted."""
        self._proving = self._start(work, name, None)

    def kill(self, how: ev.KillHow, survive_s: float) -> None:
        """TERM asks; NOW and ABORT answer with GroupEmpty or GroupStuck."""
        self._unwanted = True
        self._stop_proving()
        if self._process is None:
            self._post(ev.GroupEmpty(self.generation))
            return
        if how is ev.KillHow.TERM:
            self._our_signals.add("SIGTERM")
            self._process.terminate()
            return
        if self._ending is not None and not self._ending.done():
            return
        if self._process.exit is None:
            self._our_signals |= {"SIGKILL", "SIGABRT"} if how is ev.KillHow.ABORT else {"SIGKILL"}
        self._stop_probing()
        stuck = ev.GroupStuck(self.generation, "our killing failed by a defect")
        self._ending = self._start(self._end(self._process, how is ev.KillHow.ABORT, survive_s), "kill", stuck)

    async def end(self, survive_s: float) -> None:
        """Kill what there is of it and wait for that; who will not go is left to the kernel."""
        if self._process is not None and await self._process.end(survive_s) is not None:
            self.abandon()

    def finish(self) -> None:
        """Give the process back: its group is empty, or we give up on it."""
        self._stop_proving()
        self._stop_probing()
        if self._process is not None:
            if self._kin is not None:
                self._kin.note()
            self._process.close()
            self._process = None

    def abandon(self) -> None:
        """Its group will not go. Nobody waits for it any more; whoever does go is reaped when that happens."""
        self._unwanted = True
        self._stop_proving()
        self._stop_probing()
        if self._ending is not None:
            self._ending.cancel()
        if self._process is not None:
            self._process.abandon()
            self._process = None

    async def _end(self, process: EngineProcess, for_stacks: bool, survive_s: float) -> None:
        told_stuck = False
        if for_stacks and self.spec.forensic and process.exit is None:
            self._desk.add_stacks(await stacks_of(self.spec.argv[0], self.pids))
        while (survivors := await process.end(survive_s, for_stacks=for_stacks)) is not None:
            if not told_stuck:
                self._post(ev.GroupStuck(self.generation, survivors))
                told_stuck = True
        self.finish()
        self._post(ev.GroupEmpty(self.generation))

    def _on_lines(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            self._lines_told += self.spec.probe_path not in line.text  # what it logs of our own probes is no sign of progress
            self._around.log(self.generation, line)
            if self._around.fatal(line.text) is not None:
                self._post(ev.FatalLine(self.generation, line.text))

    def _on_progress(self, counters: Counters) -> None:
        self.counters = counters
        self._post(ev.Progress(self.generation, counters.running, counters.waiting, counters.block_violations))

    def _on_ready(self, limits: EngineLimits) -> None:
        self._settled.set()
        if self._watch_outside is not None:
            self._watch_outside.loaded()
        self._post(ev.EngineReady(self.generation, limits))

    def _on_exit(self, status: ExitStatus) -> None:
        assert self._process is not None
        if status.signal is not None:
            self.death = Death(self._process.pid, self.spec.argv[0], status.signal, time.time(), self.spec.cwd)
        self._stop_probing()
        if not self._settled.is_set() and not self._unwanted:
            self._settled.set()  # _take_over sees to it
            return
        self._settled.set()
        self._desk.add_exit(status, frozenset(self._our_signals))
        if self._watch_outside is not None:
            self._watch_outside.count_oom_kills()
        self._post(ev.EngineExited(self.generation, f"the engine was {status}" if status.signal else f"the engine {status}"))

    def _look_from_outside(self, process: EngineProcess) -> None:
        watched = Watched(
            vitals=lambda: read_vitals(process.members(), self._lines_told),
            oom_kills=process.oom_kills,
            stalled=self._on_stall,
            loading=lambda: self._post(ev.Loading(self.generation)),
            oom_killed=self._on_oom_kill,
            look=self._kin.look if self._kin is not None else lambda: None,
        )
        self._watch_outside = LifeWatch(self._probes.start_stall_s, watched)
        self._looking = self._start(self._watch_outside.run(), "life watch", None)

    def _on_stall(self, stall: Stall) -> None:
        self._desk.add_stall(stall)
        self._post(ev.HangDetected(self.generation, str(stall), stopped=stall.is_stopped))

    def _on_oom_kill(self, count: int) -> None:
        self._desk.add_oom_kills(count)
        self._post(ev.FatalLine(self.generation, "the kernel's OOM killer ended a process of the engine"))

    def _on_hang(self, hang: Hang) -> None:
        state = self._process.state if self._process is not None else ""
        self._desk.add_hang(hang, state)
        self._post(ev.HangDetected(self.generation, str(hang), stopped=state == "T"))

    def _on_ending(self, text: str) -> None:
        self._desk.add_ending(text)
        self._post(ev.EngineEnding(self.generation, text))

    def _stop_proving(self) -> None:
        if self._proving is not None:
            self._proving.cancel()
            self._proving = None

    def _stop_probing(self) -> None:
        for task in (self._probing, self._looking):
            if task is not None:
                task.cancel()
        self._probing = self._looking = None
