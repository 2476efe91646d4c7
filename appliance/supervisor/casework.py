"""From the evidence of a life that ended to the verdict, and from the decision to the record of the incident."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import structlog

from appliance.backends import Backend
from appliance.config.runtimes import name_in_force
from appliance.config.schema import Config, EngineTable
from appliance.control.codec import incident_to_json, to_json
from appliance.core.action import Action, ActionKind
from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Confidence, Diagnosis, Role
from appliance.core.errors import ApplianceError, ModelError
from appliance.core.evidence import Evidence, Source
from appliance.core.incident import Incident
from appliance.core.launch import LaunchSpec
from appliance.gpu.lost_cards import card_named_in
from appliance.supervisor import events as ev
from appliance.supervisor.card_ledger import CardLedger
from appliance.supervisor.evidence_desk import EvidenceDesk, brief, unasked, window
from appliance.supervisor.flight_recorder import FlightRecorder
from appliance.supervisor.forensic_bench import ForensicBench
from appliance.supervisor.history import Phase
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.log_ring import LogLine
from appliance.supervisor.machine import MachineState
from appliance.supervisor.policy import TABLE, Response, because
from appliance.supervisor.refusals import Refusals, diagnosis_of, line_of
from appliance.supervisor.run_note import Unclosed, about, systemd_says

OPEN_MAX = 100
"""Incidents of before that are looked at for one that nobody closed."""
LINE_LOOKS, LINE_LOOK_S = 20, 0.05
"""The engine's own line about what its counters say may take so long through its pipe."""

log = structlog.get_logger()
Diagnose = Callable[..., Diagnosis]


class Casework:
    """Owns the last incident. Decides nothing: the verdict is diagnosis's, the action the policy's."""

    def __init__(
        self,
        backend: Backend,
        desk: EvidenceDesk,
        cards: CardLedger,
        flight: FlightRecorder,
        store: IncidentStore,
        diagnose: Diagnose,
        bench: ForensicBench,
    ) -> None:
        self._bench = bench
        self._backend = backend
        self._flight = flight
        self._desk = desk
        self._cards = cards
        self._store = store
        self._diagnose = diagnose
        self.refusals = Refusals()
        newest = store.recent(OPEN_MAX)
        self.last_incident: dict[str, Any] | None = newest[0] if newest else None
        self._open = {document["incident_id"]: float(document["time_s"]) for document in newest if document["recovered_s"] is None}

    def hear(self, before: MachineState, event: ev.Event, after: MachineState) -> None:
        """What the machine finds out by its own clock is evidence too."""
        if after.answering and not before.answering:
            self._close(before.recovering[0] if before.recovering is not None else "")
        if isinstance(event, ev.TimerFired) and event.timer is ev.Timer.STABLE and after.answering and event.generation == after.generation:
            self._bench.stable()
        late = isinstance(event, ev.TimerFired) and event.timer is ev.Timer.START and before.failure is None and after.failure is not None
        if late and after.spec is not None:
            self._desk.add_late_start(after.spec.start_deadline_s)

    def judge(self, asked: ev.Diagnose, lines: Sequence[LogLine], *, uses_gpu: bool) -> ev.Diagnosed:
        """The fast verdict, on what is in memory; or the one that is known."""
        diagnosis = asked.known or self._fast(lines)
        cards_left = self._cards_left(diagnosis) if uses_gpu else None
        return ev.Diagnosed(asked.generation, diagnosis, incident_id(), random.random(), cards_left)

    def _fast(self, lines: Sequence[LogLine]) -> Diagnosis:
        evidence = brief(self._desk.collect(lines))
        began_s = time.monotonic()
        diagnosis = unasked(self._diagnose(evidence, stopped_by_us=False, engine=self._backend.name), evidence)
        took_s = time.monotonic() - began_s
        log.info(diagnosis.sentence, cause=diagnosis.cause.label, confidence=diagnosis.confidence.value, took_s=round(took_s, 3))
        return diagnosis

    def record(self, effect: ev.RecordIncident, lines: Sequence[LogLine], model: str) -> None:
        """Keep it, with all the evidence there is by now."""
        failure = effect.failure
        incident = Incident(
            incident_id=effect.incident_id,
            time_s=time.time() - (time.monotonic() - failure.time_s),
            generation=failure.generation,
            engine=self._backend.name,
            engine_version=self._backend.version,
            model=model,
            phase=failure.phase.value,
            diagnosis=effect.diagnosis,
            action=effect.action,
            evidence=window(self._desk.collect(lines), effect.diagnosis),
            rung_before=failure.rung,
            rung_after=effect.rung_after,
            inflight=tuple(request for request in self._desk.inflight if request.generation == failure.generation),
            uptime_s=failure.uptime_s,
            flight=self._flight.record,
            card=self._store.card,
        )
        self._keep(incident)
        if not failure.outside:
            self._bench.crashed(effect.diagnosis, incident.evidence)

    async def account_for(self, ended: Unclosed, unit: str | None) -> None:
        """The end of an applianced that nobody had stopped is an incident of its own; what systemd says about it is added."""
        kernel = [] if ended.rebooted else about(ended.pid, self._desk.kernel)
        evidence = [*kernel, ended.evidence(time.time())]
        diagnosis = self._diagnose(evidence, stopped_by_us=False, engine=self._backend.name)
        incident = Incident(
            incident_id=incident_id(),
            time_s=ended.heard_s,
            generation=ended.generation,
            engine=self._backend.name,
            engine_version=self._backend.version,
            model="",
            phase=(Phase.SERVING if ended.served else Phase.START).value,
            diagnosis=diagnosis,
            action=Action(ActionKind.RESTART_SAME, because("went on where the last applianced had ended", diagnosis)),
            evidence=tuple(evidence),
            uptime_s=ended.uptime_s,
            card=self._store.card,
        )
        self._keep(incident)
        said = await systemd_says(ended, unit)
        if said:
            self._store.add_evidence(incident.incident_id, said)
            better = self._diagnose([*said, *evidence], stopped_by_us=False, engine=self._backend.name)
            self._store.amend(incident.incident_id, diagnosis=to_json(better))

    async def went_on(self, count: int, state: MachineState, lines: Callable[[], Sequence[LogLine]], model: str) -> None:
        """The engine refused so many accesses to KV blocks, computed those requests again, and goes on."""
        for _ in range(LINE_LOOKS):
            if (line := line_of(lines())) is not None:
                break
            await asyncio.sleep(LINE_LOOK_S)
        diagnosis = diagnosis_of(count, line)
        now_s = time.time()
        incident = Incident(
            incident_id=incident_id(),
            time_s=now_s if line is None else line.time_s,
            generation=state.generation,
            engine=self._backend.name,
            engine_version=self._backend.version,
            model=model,
            phase=Phase.SERVING.value,
            diagnosis=diagnosis,
            action=Action(ActionKind.NONE, because("went on", diagnosis)),
            evidence=window(self._desk.collect(lines()), diagnosis),
            rung_before=state.history.rung,
            rung_after=state.history.rung,
            inflight=self._desk.inflight,
            recovered_s=0.0,
            flight=self._flight.record,
            card=self._store.card,
        )
        self._keep(incident)
        self._open.pop(incident.incident_id)

    def _keep(self, incident: Incident) -> None:
        self._store.record(incident)
        self._open[incident.incident_id] = incident.time_s
        self.last_incident = incident_to_json(incident, evidence=False)
        log.warning(
            incident.action.basis,
            incident=incident.incident_id,
            cause=incident.diagnosis.cause.label,
            action=incident.action.kind.value,
        )

    def _close(self, but: str) -> None:
        """Those that an applianced before us left open, and those of starts that failed on the way: it serves again."""
        for incident, time_s in self._open.items():
            if incident != but:
                self._store.recovered(incident, max(0.0, time.time() - time_s))
        self._open = {incident: time_s for incident, time_s in self._open.items() if incident == but}

    def recovered(self, incident: str, recovered_s: float) -> None:
        """The service is back."""
        self._open.pop(incident, None)
        self._store.recovered(incident, recovered_s)
        if self.last_incident is not None and self.last_incident["incident_id"] == incident:
            self.last_incident |= {"recovered_s": recovered_s}
        log.info("serving again", incident=incident, recovered_s=round(recovered_s, 3))

    def refused(self, why: str, state: MachineState) -> None:
        """Held weights that an engine would not serve from are evidence for the crash before, which may have written there."""
        self._store.note("weights refused", why)
        if state.recovering is not None:
            found = Evidence(Source.PROBE, f"the weight holder's memory was refused: {why}", time.time(), data={"kind": "weights"})
            self._store.add_evidence(state.recovering[0], (found,))

    def _cards_left(self, diagnosis: Diagnosis) -> int | None:
        """How many cards can still be used, the one that this verdict is about left out. None: it does not say which one that is."""
        if TABLE[diagnosis.cause].response is Response.LOST_CARD:
            roots = [link.citation.text for link in diagnosis.chain if link.role in (Role.ROOT, Role.SAME_EVENT)]
            named: Set[str] = {address for text in roots if (address := card_named_in(text)) is not None}
            known = self._cards.lost - self._desk.lost_before
            usable = {card.address for card in self._cards.usable()}
            if not named and not known and len(usable) != 1:
                return None
            named = named or known or usable
            for address in named:
                self._cards.note(address, diagnosis.sentence, for_good=diagnosis.cause is Cause.GPU_OFF_BUS)
        return len(self._cards.usable())


def incident_id() -> str:
    """Sortable by time."""
    return time.strftime("inc-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


def launch_facts(config: Config, spec: LaunchSpec) -> dict[str, object]:
    """What a verdict may need to know of the configuration, to name a key; of arguments the names alone."""
    facts: dict[str, object] = {"backend": spec.engine, "program": spec.argv[0]}
    facts["extra_args"] = [word.partition("=")[0] for word in config.engine.extra_args if word.startswith("-")]
    if spec.engine == "native":
        facts |= {"kv_pool_bytes": config.engine.kv_pool_bytes, "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    return facts


def plan_failed(generation: int, error: ApplianceError, engine: EngineTable) -> ev.PlanFailed:
    """There is nothing to start, and the backend says why."""
    return ev.PlanFailed(generation, _cannot_plan(error), incident_id(), name_in_force(engine))


def _cannot_plan(error: ApplianceError) -> Diagnosis:
    root = Citation(Source.PROBE, 0, error.message)
    remedies = (error.hint,) if error.hint else ()
    cause = Cause.MODEL_MISSING if isinstance(error, ModelError) else Cause.ENGINE_CONFIG
    return Diagnosis(cause, Confidence.HIGH, error.message, root, remedies=remedies)


def answer_to_defect(effect: ev.Effect, error: Exception, *, there_is_one: bool = False) -> ev.Event | None:
    """What the machine is told when one of its effects failed by a defect of ours. `there_is_one`: the engine runs, and has to be ended."""
    text = f"applianced itself failed ({type(error).__name__}: {error}); please report this"
    unknown = Diagnosis(Cause.UNKNOWN, Confidence.LOW, text, None)
    match effect:
        case ev.Plan(generation=generation):
            return ev.PlanFailed(generation, unknown, incident_id())
        case ev.Spawn(generation=generation) if there_is_one:
            return ev.HangDetected(generation, text)
        case ev.Spawn(generation=generation):
            return ev.SpawnFailed(generation, text)
        case ev.Prove(generation=generation):
            return ev.ProofFailed(generation, text)
        case ev.Kill(generation=generation):
            return ev.GroupStuck(generation, text)
        case ev.Diagnose(generation=generation):
            return ev.Diagnosed(generation, unknown, incident_id(), 0.0)
        case ev.WaitForGpu():
            return ev.GpuWaiting(text)
    return None
