"""The reducer's part from the first fatal evidence to the decision: no clients, empty the group, verdict, action."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.action import Action, ActionKind
from appliance.core.diagnosis import Diagnosis
from appliance.core.plan import Rung
from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.history import Failure, Phase
from appliance.supervisor.machine.rungs import descended
from appliance.supervisor.machine.state import MachineState, Purpose, Step, again, move, park
from appliance.supervisor.machine.stopping import finish_stop
from appliance.supervisor.policy import TABLE, Response, because, decide

SETTLE_S = 0.05
"""After a fatal line, what belongs to it (the traceback, a parent's sentence) arrives within so long; then the group is killed."""


def fail(
    state: MachineState,
    text: str,
    now_s: float,
    kill: ev.KillHow | None,
    *,
    outside: bool = False,
    refused: bool = False,
    known: Diagnosis | None = None,
    offers: tuple[Rung, ...] | None = None,
) -> Step:
    """The first fatal evidence of a life. Without effect when there is none to fail, it failed already, or it was asked to end.

    One that was leaving by itself is not waited for any longer.
    """
    if state.leaving:
        return replace(state, leaving=False), (ev.Kill(state.generation, kill, text, requested=False),) if kill is not None else ()
    if state.failure is not None or state.stopping or not state.running:
        return state, ()
    served = state.answering or (state.state is EngineState.DRAINING and state.limits is not None)
    failure = Failure(
        time_s=now_s,
        generation=state.generation,
        phase=Phase.SERVING if served else Phase.START,
        rung=state.history.rung,
        first_evidence=text,
        uptime_s=now_s - state.since_s if state.answering else 0.0,
        outside=outside,
        worst_case=state.worst_case,
        refused=refused,
        known=known,
        runtime=state.spec.runtime if state.spec is not None else "",
        offers=offers,
    )
    to = EngineState.DRAINING if state.state is EngineState.DRAINING else EngineState.BACKOFF
    words = text[:300] if refused else f"the engine failed: {text[:300]}"
    failed = move(state, to, now_s, words, failure=failure, limits=None)
    return failed, (ev.Kill(state.generation, kill, text, requested=False),) if kill is not None else ()


def on_fatal_line(state: MachineState, text: str, now_s: float) -> Step:
    """Clients are held at once; the group lives on for SETTLE_S, so that what explains the line is read."""
    failed, _ = fail(state, text, now_s, kill=None)
    if failed is state:
        return state, ()
    return failed, (ev.SetTimer(ev.Timer.SETTLE, state.generation, SETTLE_S),)


def on_ending(state: MachineState, text: str, now_s: float) -> Step:
    """Somebody else told it to stop: new requests are held for the next life, the running ones may finish, within a deadline."""
    failed, _ = (state, ()) if state.leaving else fail(state, text, now_s, kill=None)
    if failed is state:
        return state, ()
    return replace(failed, leaving=True), (ev.SetTimer(ev.Timer.STOP, state.generation, state.settings.stop_deadline_s),)


def on_gpu_lost(state: MachineState, text: str, now_s: float) -> Step:
    """A card is gone: with the engine on it, or before the one that was planned for it has begun."""
    if state.state is EngineState.PLANNING:
        return again(state, now_s, f"a card was lost: {text[:300]}")
    return fail(state, text, now_s, kill=ev.KillHow.NOW)


def on_spawn_failed(state: MachineState, text: str, now_s: float) -> Step:
    """There never was a process."""
    if not state.alive:
        return state, ()
    gone = replace(state, alive=False)
    if gone.stopping:
        return finish_stop(gone, now_s)
    failed, _ = fail(gone, text, now_s, kill=None)
    return failed, (ev.Diagnose(state.generation),)


def on_exit(state: MachineState, text: str, now_s: float) -> Step:
    """The leader is dead. Whoever is left of the group goes too (SGLang's schedulers linger), and its emptiness is reported."""
    if not state.alive:
        return state, ()
    failed, _ = fail(state, text, now_s, kill=None)
    return failed, (ev.Kill(state.generation, ev.KillHow.NOW, "its leader is gone", requested=state.stopping),)


def on_group(state: MachineState, event: ev.GroupEmpty | ev.GroupStuck, now_s: float) -> Step:
    """The group is empty, or will not be."""
    if not state.alive:
        return state, ()
    gone = replace(state, alive=isinstance(event, ev.GroupStuck))
    gone, _ = fail(gone, "the engine's processes are gone", now_s, kill=None)
    if gone.failure is not None:
        return gone, (ev.Diagnose(state.generation, gone.failure.known),)
    if gone.stopping:
        return finish_stop(gone, now_s)
    return gone, ()


def on_diagnosis(state: MachineState, event: ev.Diagnosed, now_s: float) -> Step:
    """The verdict: record it and act on it, unless a person or the service manager wanted the engine gone anyway."""
    failure = state.failure
    if failure is None:
        return state, ()
    judged = replace(state, failure=None, leaving=False, incident_id=event.incident_id)
    if state.purpose is Purpose.RESTART and state.uses_gpu and TABLE[event.diagnosis.cause].response is Response.LOST_CARD:
        # The restart is what comes of it anyway; on which cards, or whether at all, is the policy's to say.
        judged = replace(judged, purpose=None)
        judged = judged if state.state is EngineState.BACKOFF else move(judged, EngineState.BACKOFF, now_s, state.sentence)
    if judged.purpose is not None:
        action = Action(ActionKind.NONE, because(f"went on with the {judged.purpose.value} that was asked for", event.diagnosis))
        after, effects = finish_stop(judged, now_s)
        rung_after = state.history.rung
    else:
        offers = failure.offers if failure.refused else event.offers
        ran = state.spec.rung if state.spec is not None else state.rung
        history = state.history.with_failure(event.diagnosis.cause, failure.phase, ran, refused=failure.refused, outside=failure.outside)
        action = decide(
            event.diagnosis, history, state.ladder, state.settings, failure,
            jitter=event.jitter, cards_left=event.cards_left, offers=offers,
        )  # fmt: skip
        moved = _moved(replace(judged, history=history), action, offers)
        rung_after = moved.history.rung
        after, effects = _act(moved, failure, event.diagnosis, action, now_s)
    return after, (ev.RecordIncident(event.incident_id, failure, event.diagnosis, action, rung_after), *effects)


def _moved(state: MachineState, action: Action, offers: tuple[Rung, ...] | None) -> MachineState:
    """On the action's rung, which may be one that was only offered."""
    history, rung = state.history, action.rung
    if rung is None or rung.index == history.rung:
        return state
    if history.climbed_from is not None and rung == state.ladder[history.climbed_from]:
        return replace(state, history=history.fallen_back())
    ladder = state.ladder
    if offers is not None and rung.index > history.rung:
        ladder = descended(ladder, history.rung, offers, rung)
        history = replace(history, climbed_from=None)  # what it had climbed from stands there no more
    if action.kind is ActionKind.USE_REMAINING_GPU:  # what it had climbed from may want the lost card too: no probation goes on
        history = replace(history, wants=history.rung if history.wants is None else history.wants, climbed_from=None)
    return replace(state, ladder=ladder, history=replace(history, rung=rung.index).standing_on(ladder))


def _act(state: MachineState, failure: Failure, diagnosis: Diagnosis, action: Action, now_s: float) -> Step:
    if action.kind is ActionKind.PARK:
        parked, effects = park(state, action.basis, now_s)
        lost_card = TABLE[diagnosis.cause].response is Response.LOST_CARD
        return parked, (*effects, ev.Reboot(diagnosis.sentence)) if lost_card else effects
    if state.alive and action.kind is ActionKind.USE_REMAINING_GPU:
        # Who is stuck is stuck on the lost card: it holds nothing that the next life needs.
        after, effects = _act(replace(state, alive=False), failure, diagnosis, action, now_s)
        return after, (ev.Abandon(failure.generation), *effects)
    if state.alive:
        because_stuck = "its processes survive SIGKILL, and a second engine beside them would share their memory; to do: reboot"
        return park(state, f"parked because {because_stuck} (first: {action.basis})", now_s)
    recovering = state.recovering or (state.incident_id or "", failure.time_s)
    told = replace(state, sentence=action.basis, basis=action.basis, recovering=recovering, delay_s=action.delay_s)
    back = (ev.UseRuntime(action.runtime),) if action.runtime is not None else ()
    if action.delay_s > 0:
        return told, (*back, ev.SetTimer(ev.Timer.BACKOFF, state.generation, action.delay_s))
    after, effects = again(told, now_s, told.sentence, through_gpu=TABLE[diagnosis.cause].response is Response.WAIT_FOR_GPU)
    return after, (*back, *effects)
