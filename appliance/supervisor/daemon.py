"""applianced's one loop: events in, the reducer, effects out. Decides nothing; every decision is in machine/ and policy.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from appliance.backends import Backend, backend_of
from appliance.config.schema import Config
from appliance.control.server import PublicationBoard
from appliance.core.errors import ApplianceError
from appliance.core.plan import GpuFacts
from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, EngineState
from appliance.gpu.kernel_line import KernelLine
from appliance.planner.calibration import CPU
from appliance.supervisor import events as ev
from appliance.supervisor.aftermath import examine
from appliance.supervisor.box import Box
from appliance.supervisor.budget import Budget
from appliance.supervisor.casework import Casework, Diagnose, answer_to_defect, launch_facts, plan_failed
from appliance.supervisor.evidence_desk import EvidenceDesk
from appliance.supervisor.flight_recorder import FlightRecorder
from appliance.supervisor.forensic_bench import ForensicBench
from appliance.supervisor.gpu_watch import GpuWatch
from appliance.supervisor.history import History
from appliance.supervisor.hook import run_hook
from appliance.supervisor.incidents import IncidentStore, Memory
from appliance.supervisor.ladder import started_from
from appliance.supervisor.launching import probe_settings, spare_wish
from appliance.supervisor.life import EngineLife, Surroundings
from appliance.supervisor.log_ring import LogLine, LogRing
from appliance.supervisor.machine import MachineState, Purpose, publication_of, step
from appliance.supervisor.notify import Notifier
from appliance.supervisor.offering import informed, is_last
from appliance.supervisor.reboot import Rebooter
from appliance.supervisor.reload import Change, changes, merged
from appliance.supervisor.roll_back import go_back_to
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.run_note import Unclosed, own_unit
from appliance.supervisor.sensors import sensors_of
from appliance.supervisor.settings import MachineSettings, fingerprint
from appliance.supervisor.spare_keeper import SpareKeeper, Wish
from appliance.supervisor.timers import Timers
from appliance.supervisor.weight_keeper import WeightKeeper

TURN_S = 1.0
"""A turn is completed at least so often, for the watchdog."""
EVENTS_A_TURN = 1000
CORPSE_S = 3.0
"""After SIGKILL to an engine that has just lost a card: who is still there is stuck in the driver, and the other card waits."""

log = structlog.get_logger()


class Supervisor:
    """Owns the machine's state, the engine life, the timers. One writer: `run`."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        store: IncidentStore,
        notifier: Notifier,
        box: Box,
        *,
        diagnose: Diagnose,
        is_fatal_line: Callable[[str], str | None],
    ) -> None:
        self.config = config
        self.backend: Backend = backend_of(config)
        self.run_dir = run_dir
        self.store = store
        self.notifier = notifier
        self.box = box
        self.cards = box.cards
        self.kernel_log = box.ears.ear()
        self.desk = EvidenceDesk(self.kernel_log.boot_id)
        self.began_s = time.monotonic()
        self.gpu = GpuWatch(self.backend, box, self.desk, self.post, self.start_task)
        self.flight = FlightRecorder(
            self.gpu.ask_nvml, lambda: self.life.counters if self.life is not None else None, lambda: self.state.uses_gpu
        )
        self.bench = ForensicBench(store, store.folder / "-".join(filter(None, ("forensics", store.card))))
        self.casework = Casework(self.backend, self.desk, self.cards, self.flight, store, diagnose, self.bench)
        self.life: EngineLife | None = None
        self.budget = Budget(self.backend, store.whole, self.post, self.gpu.look, lambda: self.state.history.below)
        self.state = self._first_state()
        self.board = PublicationBoard(publication_of(self.state))
        self.spares = SpareKeeper(self._wish, box.groups.of_spare, self.start_task)
        self.weights = WeightKeeper(run_dir.path, box.groups.of_holder, self.start_task, lambda it: self.casework.refused(it, self.state))
        self._events: deque[tuple[ev.Event, asyncio.Future[MachineState] | None]] = deque()
        self._woken = asyncio.Event()
        self._timers = Timers(self.post)
        self.reboots = Rebooter(store)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._have_served = False
        self._around = Surroundings(self.desk, self.post, self.start_task, is_fatal_line)

    # -- the loop --------------------------------------------------------------------------------------------------------

    async def run(self, unclosed: Unclosed | None = None) -> None:
        """Until stopped. The only caller of step(). `unclosed`: how the last applianced ended, where that is to be accounted for here."""
        self.kernel_log.start(self._on_kernel_lines)
        self.post(ev.Started())
        if unclosed is not None:
            self.start_task(self.casework.account_for(unclosed, own_unit()), "account", None)
        self.start_task(self.flight.run(), "flight recorder", None)
        self.notifier.ready()
        try:
            while not self._ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(TURN_S, self.notifier.watchdog_interval_s or TURN_S)):
                        await self._woken.wait()
                self._turn()
        finally:
            await self._put_away()

    def post(self, event: ev.Event) -> None:
        """Something happened; the next turn sees it."""
        self._events.append((event, None))
        self._woken.set()

    async def obey(self, event: ev.Event) -> tuple[MachineState, MachineState]:
        """Post a request and wait until it was seen: the state right before and after it."""
        seen: asyncio.Future[MachineState] = asyncio.get_running_loop().create_future()
        self._events.append((event, seen))
        self._woken.set()
        return await seen, self.state

    def start_task(self, work: Coroutine[Any, Any, None], name: str, if_defect: ev.Event | None) -> asyncio.Task[None]:
        """Beside the loop. A defect in it is logged, and the event posted, so that the machine never waits for ever."""

        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error("a task failed; please report this", task=name, exc_info=error)
                if if_defect is not None:
                    self.post(if_defect)

        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(finished)
        return task

    def _turn(self) -> None:
        self._woken.clear()
        for _ in range(EVENTS_A_TURN):
            if not self._events or self._ended:
                break
            event, seen = self._events.popleft()
            before, event = self.state, self._informed(event)
            self.state, effects = step(before, event, time.monotonic())
            self._tell(before, event)
            for effect in effects:
                self._perform_guarded(effect)
            if seen is not None and not seen.done():
                seen.set_result(before)
        if self._events:
            self._woken.set()
        self.store.try_again()
        if self.state.purpose is Purpose.EXIT:
            self.notifier.extend()
        self.notifier.turn_done()

    def _informed(self, event: ev.Event) -> ev.Event:
        try:
            return informed(event, self.state, self.budget, self.config, self._first_card)
        except Exception as error:
            log.error("the planner failed; please report this", about=type(event).__name__, exc_info=error)
            return event

    def _tell(self, before: MachineState, event: ev.Event) -> None:
        if before.state is not self.state.state:
            move = f"{before.state.value} -> {self.state.state.value}"
            log.info(self.state.sentence, state=self.state.state.value, before=before.state.value, generation=self.state.generation)
            self.store.note(move, self.state.sentence)
            self.spares.look()
            self._have_served |= self.state.answering
            if before.state is EngineState.PARKED:
                self.reboots.call_off()
            if self.state.state is EngineState.DRAINING and self.life is not None:
                self.life.hurry()
            if before.state is EngineState.PROVING and self.state.limits is not None and self.state.answering and self.life is not None:
                served = self.budget.served(self.config, self.life, self.state.limits, last=self._on_last_rung)
                self.life.follow(served, "budget")
        self.casework.hear(before, event, self.state)
        if isinstance(event, ev.Progress) and (refused := self.casework.refusals.news(event, time.monotonic())):
            self.start_task(self.casework.went_on(refused, self.state, lambda: self._lines, self.model_name), "refusals", None)
        if isinstance(event, ev.StopRequested):
            self.notifier.stopping()
        if isinstance(event, ev.ResumeRequested) and before.state is EngineState.PARKED:
            self.gpu.forgive()

    def _perform_guarded(self, effect: ev.Effect) -> None:
        """A defect in our hands may not end the service: it is logged, and the machine gets an answer that it can act on."""
        try:
            self._perform(effect)
        except Exception as error:
            log.error("an effect failed; please report this", effect=type(effect).__name__, exc_info=error)
            there_is_one = isinstance(effect, ev.Spawn) and self.life is not None and self.life.pid is not None
            answer = answer_to_defect(effect, error, there_is_one=there_is_one)
            if answer is not None:
                self.post(answer)

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.WaitForGpu():
                self.gpu.begin(self.config, have_served=self._have_served)
            case ev.Plan():
                self._plan(effect)
            case ev.Spawn():
                self._spawn(effect)
            case ev.Prove() if self.life is not None:
                self._prove(self.life)
            case ev.Kill() if self.life is not None and self.life.generation == effect.generation:
                self._kill(effect, self.life)
            case ev.Kill(generation=generation):
                self.post(ev.GroupEmpty(generation))
            case ev.Abandon() if self.life is not None:
                self.life.abandon()
                self.life = None
            case ev.Diagnose():
                self.kernel_log.drain()
                self.post(self.casework.judge(effect, self._lines, uses_gpu=self.state.uses_gpu))
            case ev.SetTimer():
                self._timers.set(effect)
            case ev.Exit():
                self._ended = True
            case _:
                self._record(effect)

    def _record(self, effect: ev.Effect) -> None:
        match effect:
            case ev.RecordIncident():
                self.casework.record(effect, self._lines, self.model_name)
                self.weights.judged(effect.diagnosis.cause, effect.action.kind)
                self._examine(effect.incident_id)
            case ev.RecordRecovery(incident_id=incident, recovered_s=recovered_s):
                self.casework.recovered(incident, recovered_s)
            case ev.SaveHistory(history=history, generation=generation):
                self.run_dir.note_generation(generation)
                self.store.remember(Memory(history, generation, fingerprint(self.config)))
            case ev.Publish(publication=publication):
                self._publish(publication)
            case ev.UseRuntime(runtime=runtime):
                go_back_to(self.config.engine.python, runtime)
            case ev.Reboot(reason=reason):
                self.reboots.begin(self.config.supervisor, reason)
            case ev.RunHook(sentence=sentence) if self.config.supervisor.on_park:
                self.start_task(run_hook((*self.config.supervisor.on_park, self.box.named(sentence))), "on_park", None)

    def _examine(self, incident: str) -> None:
        death = self.life.death if self.life is not None else None
        gather = functools.partial(self.bench.gather, self.life.spec, [line.text for line in self._lines]) if self.life else list
        program, ours = self.life.spec.argv[0] if self.life else "", self.run_dir.path
        work = examine(incident, death, self.flight.record, self.store, self._settled, ours, gather, self.bench.caught, program)
        self.start_task(work, "aftermath", None)

    async def _settled(self) -> None:
        """Until the service is back, or given up."""
        async for publication in self.board.follow():
            if publication.state in ANSWERING or publication.state is EngineState.PARKED:
                return

    # -- starting --------------------------------------------------------------------------------------------------------

    def _first_state(self) -> MachineState:
        memory = self.store.load()
        # Another configuration is another story: what failed under the old one is not held against the new one.
        history = memory.history if memory.settings == fingerprint(self.config) else History()
        ladder = self.budget.ladder(self.config, history.below)
        return MachineState(
            settings=MachineSettings.of(self.config),
            ladder=ladder,
            history=history.fitted(len(ladder)),
            generation=max(memory.generation, self.run_dir.generation),
            since_s=time.monotonic(),
        )

    def _plan(self, effect: ev.Plan) -> None:
        self._finish_life()
        try:
            config = started_from(self.config, effect.rung)
            spec = self.backend.launch_spec(config, effect.rung, effect.generation, self.run_dir.path)
            spec = self.gpu.fitted(spec, self.config) if self.state.uses_gpu else spec
        except ApplianceError as error:
            self.post(plan_failed(effect.generation, error, self.config.engine))
        else:
            self.post(ev.Planned(effect.generation, self.bench.make_room(self.bench.fit(spec, effect.generation))))

    def _spawn(self, effect: ev.Spawn) -> None:
        self.run_dir.remove_engine_sockets()
        self.desk.begin_life(self.cards.lost)
        place = self.cards.first_uuid if self.state.uses_gpu else CPU
        self.budget.begin_life(self.config, place, self.gpu.card(place), effect.spec.rung.tensor_parallel)
        self.desk.add_launch(launch_facts(self.config, effect.spec))
        self.life = life = EngineLife(effect.generation, effect.spec, self._around)
        limits_told = self.backend.limits(self.config, effect.spec.rung)
        self.weights.begin_life(effect.spec.holder, spare := self.spares.take(effect.spec))
        probes, ring = probe_settings(self.config, self.backend), LogRing(self.config.diagnosis.log_ring_lines)
        life.begin(lambda: self.box.groups.of_life(effect.generation), ring, probes, limits_told, spare)

    def _prove(self, life: EngineLife) -> None:
        limits = self.state.limits or self.backend.limits(self.config, life.spec.rung)

        async def then() -> None:
            await self.budget.prove(self.config, life, limits, last=self._on_last_rung)

        life.prove(self.backend.proof(self.config), then)

    def _on_last_rung(self) -> bool:
        return is_last(self.state, self.budget, self.config)

    def _first_card(self) -> GpuFacts | None:
        return self.gpu.card(self.cards.first_uuid)

    def _wish(self) -> Wish:
        return spare_wish(self.state, self.config, self.backend, self.bench, self.run_dir.path)

    # -- ending ----------------------------------------------------------------------------------------------------------

    def _kill(self, effect: ev.Kill, life: EngineLife) -> None:
        if effect.requested:
            word = "SIGTERM" if effect.how is ev.KillHow.TERM else "SIGKILL"
            self.desk.add_stop(word, effect.reason, "applianced")
        log.info("ending the engine", how=effect.how.value, generation=effect.generation, reason=effect.reason)
        lost_a_card = bool(self.cards.lost - self.desk.lost_before)
        life.kill(effect.how, CORPSE_S if lost_a_card else self.config.supervisor.stop_deadline_s)

    def sensors(self) -> dict[str, dict[str, Any]]:
        """Each of our ears: whether it hears, and why not."""
        problems = {"kernel_log": self.kernel_log.problem, "incidents": self.store.problem}
        if self.state.uses_gpu:
            problems["nvml"] = self.gpu.nvml_problem
        others = {"warm_spare": self.spares.sensor, "forensics": self.bench.sensor, **self.weights.sensors}
        return sensors_of(problems, self.cards, self.gpu.words, delegated=self.box.groups.delegated) | others

    def reload(self, config: Config) -> tuple[Change, ...]:
        """Take over what can be taken over; says what changed and when it counts."""
        found, wanted = changes(self.config, config), merged(self.config, config)
        anew = fingerprint(wanted) != fingerprint(self.config)
        ladder = self.budget.ladder(wanted, () if anew else self.state.history.below)
        self.config = wanted  # only now: what cannot be worked out changes nothing
        self.reboots.obey(wanted.supervisor)
        self.post(ev.SettingsChanged(MachineSettings.of(self.config), ladder, anew))
        self.spares.look()
        return found

    @property
    def model_name(self) -> str:
        """The id that clients use."""
        return (self.state.limits or self.backend.limits(self.config, self.state.rung)).model_id

    @property
    def _lines(self) -> tuple[LogLine, ...]:
        return self.life.lines if self.life is not None else ()

    def _finish_life(self) -> None:
        if self.life is not None:
            self.life.finish()
            self.life = None

    async def _put_away(self) -> None:
        self.kernel_log.stop()
        self._timers.cancel()
        self.reboots.call_off()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.spares.close(), self.weights.close())
        await self.box.close()
        if self.life is not None:  # of an end by a defect of ours, or of a second SIGTERM while its group is being emptied
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CORPSE_S):
                    await self.life.end(CORPSE_S)
        self._finish_life()
        self.run_dir.remove_engine_sockets()

    # -- ears and mouth --------------------------------------------------------------------------------------------------

    def _on_kernel_lines(self, lines: Sequence[KernelLine]) -> None:
        for line in lines:
            ours = not line.replayed or self.kernel_log.is_of_this_boot
            card = self.gpu.hear(line.text, replayed=line.replayed) if ours else None
            if self.box.roots.concerns(card):
                self.desk.add_kernel(line, card)

    def _publish(self, publication: Publication) -> None:
        self.board.post(publication)
        self.notifier.status(publication.reason)
