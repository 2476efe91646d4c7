"""The reducer's part from the cards to the first client: WAITING_FOR_GPU, PLANNING, STARTING, PROVING, SERVING."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.action import Action, ActionKind
from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.history import Failure, Phase
from appliance.supervisor.machine.failing import fail
from appliance.supervisor.machine.state import MachineState, Step, move, park, plan
from appliance.supervisor.policy import park_basis

CLIMB_DOUBLINGS_MAX = 10
"""A thousand times the configured wait is for ever."""


def on_gpu(state: MachineState, event: ev.GpuReady | ev.NoGpu | ev.GpuWaiting | ev.CardsGone, now_s: float) -> Step:
    """The cards are there, are not there, or never will be."""
    if state.state is not EngineState.WAITING_FOR_GPU:
        return state, ()
    match event:
        case ev.GpuWaiting(reason=reason):
            return replace(state, sentence=f"waiting for the GPU: {reason}"), ()
        case ev.CardsGone(reason=reason):
            parked, effects = park(state, f"parked because {reason}", now_s)
            return parked, (*effects, ev.Reboot(reason))
        case ev.NoGpu(reason=reason) if state.settings.gpu_required:
            cure = "set gpu.mode = auto to serve on the CPU, then appliancectl resume"
            return park(state, f"parked because {reason} and gpu.mode is required; to do: {cure}", now_s)
        case ev.NoGpu(reason=reason):
            return plan(replace(state, uses_gpu=False, cards=0), now_s, f"{reason}: going on with the CPU")
        case ev.GpuReady(cards=cards, note=note):
            return plan(replace(state, uses_gpu=True, cards=cards), now_s, f"the GPU is ready: {note or cards}")


def on_planned(state: MachineState, event: ev.Planned, now_s: float) -> Step:
    """A command line: start it, as the next generation."""
    starting = move(
        state, EngineState.STARTING, now_s, "",
        generation=event.generation, alive=True, spec=event.spec, limits=None, stopping=False,
        spawned_s=now_s, loading_s=0.0, restarts=state.restarts + (state.spec is not None),
    )  # fmt: skip
    deadline = ev.SetTimer(ev.Timer.START, event.generation, event.spec.start_deadline_s)
    return _told(starting, "the engine is loading"), (ev.Spawn(event.generation, event.spec), deadline)


def on_plan_failed(state: MachineState, event: ev.PlanFailed, now_s: float) -> Step:
    """Nothing to start, and only a person can change that."""
    failure = Failure(now_s, state.generation, Phase.START, state.history.rung, event.diagnosis.sentence)
    action = Action(ActionKind.PARK, park_basis("", event.diagnosis))
    record = ev.RecordIncident(event.incident_id, failure, event.diagnosis, action, state.history.rung)
    parked, effects = park(replace(state, incident_id=event.incident_id), action.basis, now_s)
    return parked, (record, *effects)


def on_late(state: MachineState, now_s: float) -> Step:
    """Its start deadline has passed. One that still loads is given more, for as long as it does; one that only computes is not."""
    stall_s = state.settings.start_stall_s
    if state.state is EngineState.STARTING and state.loading_s and now_s - state.loading_s <= stall_s:
        return state, (ev.SetTimer(ev.Timer.START, state.generation, stall_s),)
    deadline_s = state.spec.start_deadline_s if state.spec is not None else 0.0
    text = f"the engine did not prove itself within {deadline_s:g} s of its start (supervisor.start_deadline_s)"
    return fail(state, text, now_s, kill=ev.KillHow.ABORT)


def on_ready(state: MachineState, event: ev.EngineReady, now_s: float) -> Step:
    """It answers its probe; now it has to answer a prompt."""
    if state.state is not EngineState.STARTING:
        return state, ()
    proving = move(state, EngineState.PROVING, now_s, "", limits=event.limits)
    return _told(proving, "the engine answers and has to complete one short prompt"), (ev.Prove(state.generation),)


def on_proved(state: MachineState, now_s: float) -> Step:
    """Clients may have it."""
    if state.state is not EngineState.PROVING:
        return state, ()
    rung = state.rung
    to = EngineState.DEGRADED if rung.index else EngineState.SERVING
    safer = ", safer than configured" + (f" (gives up {rung.gives_up})" if rung.gives_up else "") if rung.index else ""
    name = state.limits.model_id if state.limits is not None else "the model"
    served = move(
        state, to, now_s, f"serving {name} on rung {rung.index}{safer} (generation {state.generation})",
        history=state.history.proved(), start_took_s=now_s - state.spawned_s, basis="", recovering=None, incident_id=None,
    )  # fmt: skip
    timers = [ev.SetTimer(ev.Timer.STABLE, state.generation, state.settings.stable_after_s)]
    if rung.index and state.settings.climb_after_s:
        climb_after_s = state.settings.climb_after_s * 2 ** min(state.history.failed_climbs, CLIMB_DOUBLINGS_MAX)
        timers.append(ev.SetTimer(ev.Timer.CLIMB, state.generation, climb_after_s))
    if state.recovering is None:
        return served, tuple(timers)
    incident_id, began_s = state.recovering
    return served, (ev.RecordRecovery(incident_id, now_s - began_s), *timers)


def _told(state: MachineState, what: str) -> MachineState:
    after = f"; {state.basis}" if state.basis else ""
    return replace(state, sentence=f"{what} (rung {state.history.rung}, generation {state.generation}){after}")
