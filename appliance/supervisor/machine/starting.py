"""The reducer's part from the cards to the first answered probe: WAITING_FOR_GPU, PLANNING, STARTING."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.history import Failure, Phase
from appliance.supervisor.machine.failing import fail
from appliance.supervisor.machine.rungs import relaid
from appliance.supervisor.machine.state import MachineState, Step, move, park, plan, told
from appliance.supervisor.policy import after_failed_plan


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
        case ev.GpuReady(cards=cards, note=note, ladder=ladder):
            seen = state if ladder is None else relaid(state, ladder)
            return plan(replace(seen, uses_gpu=True, cards=cards), now_s, f"the GPU is ready: {note or cards}")


def on_planned(state: MachineState, event: ev.Planned, now_s: float) -> Step:
    """A command line: start it, as the next generation; unless a person has asked for another rung meanwhile."""
    if state.next_rung is not None:
        return plan(state, now_s, state.sentence)
    starting = move(
        state, EngineState.STARTING, now_s, "",
        generation=event.generation, alive=True, spec=event.spec, limits=None, stopping=False, leaving=False, worst_case=False,
        spawned_s=now_s, loading_s=0.0, restarts=state.restarts + (state.spec is not None),
    )  # fmt: skip
    deadline = ev.SetTimer(ev.Timer.START, event.generation, event.spec.start_deadline_s)
    return told(starting, "the engine is loading"), (ev.Spawn(event.generation, event.spec), deadline)


def on_plan_failed(state: MachineState, event: ev.PlanFailed, now_s: float) -> Step:
    """Nothing to start: back to the runtime that served, or parked."""
    failure = Failure(now_s, state.generation, Phase.START, state.history.rung, event.diagnosis.sentence, runtime=event.runtime)
    history = state.history.with_failure(event.diagnosis.cause, Phase.START, state.rung)
    action = after_failed_plan(event.diagnosis, history, state.rung, failure, state.settings)
    record = ev.RecordIncident(event.incident_id, failure, event.diagnosis, action, state.history.rung)
    seen = replace(state, incident_id=event.incident_id)
    if action.runtime is not None:
        recovering = state.recovering or (event.incident_id, now_s)
        again, effects = plan(replace(seen, history=history, basis=action.basis, recovering=recovering), now_s, action.basis)
        return again, (record, ev.UseRuntime(action.runtime), *effects)
    parked, effects = park(seen, action.basis, now_s)
    return parked, (record, *effects)


def on_late(state: MachineState, now_s: float) -> Step:
    """Its start deadline has passed. One that still loads is given more, for as long as it does; one that only computes is not."""
    stall_s = state.settings.start_stall_s
    if state.state is EngineState.STARTING and state.loading_s and now_s - state.loading_s <= stall_s:
        return state, (ev.SetTimer(ev.Timer.START, state.generation, stall_s),)
    deadline_s = state.spec.start_deadline_s if state.spec is not None else 0.0
    text = f"the engine did not prove itself within {deadline_s:g} s of its start (supervisor.start_deadline_s)"
    return fail(state, text, now_s, kill=ev.KillHow.ABORT)
