"""The reducer's part from the first answered probe to the first client: PROVING, then SERVING or DEGRADED, or another rung."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.machine.failing import fail
from appliance.supervisor.machine.state import MachineState, Step, move, told
from appliance.supervisor.policy import rung_for_refused

CLIMB_DOUBLINGS_MAX = 10
"""A thousand times the configured wait is for ever."""


def on_ready(state: MachineState, event: ev.EngineReady, now_s: float) -> Step:
    """It answers its probe; now it has to answer a prompt."""
    if state.state is not EngineState.STARTING:
        return state, ()
    proving = move(state, EngineState.PROVING, now_s, "", limits=event.limits)
    return told(proving, "the engine answers and has to complete one short prompt"), (ev.Prove(state.generation),)


def on_worst_case(state: MachineState, event: ev.WorstCaseBegun) -> Step:
    """It has its deadline anew."""
    if state.state is not EngineState.PROVING:
        return state, ()
    deadline_s = state.spec.start_deadline_s if state.spec is not None else 0.0
    words = f"the engine is being proved by a prompt of {event.prompt_tokens:,} tokens, the longest that it promises to take (ladder.prove)"
    return told(replace(state, worst_case=True), words), (ev.SetTimer(ev.Timer.START, state.generation, deadline_s),)


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
        history=state.history.proved(state.spec.runtime if state.spec is not None else ""),
        start_took_s=now_s - state.spawned_s, basis="", recovering=None, incident_id=None, worst_case=False,
    )  # fmt: skip
    timers = [ev.SetTimer(ev.Timer.STABLE, state.generation, state.settings.stable_after_s)]
    if rung.index and state.settings.climb_after_s:
        climb_after_s = state.settings.climb_after_s * 2 ** min(state.history.failed_climbs, CLIMB_DOUBLINGS_MAX)
        timers.append(ev.SetTimer(ev.Timer.CLIMB, state.generation, climb_after_s))
    if state.recovering is None:
        return served, tuple(timers)
    incident_id, began_s = state.recovering
    return served, (ev.RecordRecovery(incident_id, now_s - began_s), *timers)


def on_refused(state: MachineState, event: ev.ProofRefused, now_s: float) -> Step:
    """To the next rung; the last one is served all the same, for it works: short of memory is better than gone."""
    if rung_for_refused(state.history, state.ladder, event.offers) is not None:
        return fail(state, event.text, now_s, kill=ev.KillHow.NOW, refused=True, known=event.diagnosis, offers=event.offers)
    served, effects = on_proved(state, now_s)
    if served is state:
        return state, ()
    return replace(served, sentence=f"{served.sentence}; its proof was refused and there is no safer rung: {event.text}"), effects
