"""The reducer itself: drop what is stale, dispatch, and append what every change entails."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.history import History
from appliance.supervisor.machine import failing, proving, starting, stopping
from appliance.supervisor.machine.rungs import relaid
from appliance.supervisor.machine.state import MachineState, Step, again, publication_of


def step(state: MachineState, event: ev.Event, now_s: float) -> Step:
    """What an event makes of a state, and what is to be done about it, in order.

    A changed history or generation is saved first (a kill -9 right after may not take it back), a changed publication
    goes out next, then come the effects proper.
    """
    if state.state is EngineState.STOPPED or _is_stale(state, event):
        return state, ()
    after, effects = _react(state, event, now_s)
    saved = (ev.SaveHistory(after.history, after.generation),) if _memory(after) != _memory(state) else ()
    publication = publication_of(after)
    news = publication != publication_of(state) or isinstance(event, ev.Started)
    return after, (*saved, *((ev.Publish(publication),) if news else ()), *effects)


def _is_stale(state: MachineState, event: ev.Event) -> bool:
    generation = getattr(event, "generation", None)
    if generation is None:
        return False
    if isinstance(event, ev.Planned | ev.PlanFailed):
        return state.state is not EngineState.PLANNING or generation != state.generation + 1
    return bool(generation != state.generation)


def _memory(state: MachineState) -> tuple[History, int]:
    return state.history, state.generation


def _react(state: MachineState, event: ev.Event, now_s: float) -> Step:
    match event:
        case ev.Started():
            return state, (ev.WaitForGpu(),)
        case ev.GpuReady() | ev.NoGpu() | ev.GpuWaiting() | ev.CardsGone():
            return starting.on_gpu(state, event, now_s)
        case ev.Planned():
            return starting.on_planned(state, event, now_s)
        case ev.PlanFailed():
            return starting.on_plan_failed(state, event, now_s)
        case ev.Loading():
            return replace(state, loading_s=now_s), ()
        case ev.EngineReady():
            return proving.on_ready(state, event, now_s)
        case ev.WorstCaseBegun():
            return proving.on_worst_case(state, event)
        case ev.Proved():
            return proving.on_proved(state, now_s)
        case ev.Progress(running=0, waiting=0):
            return stopping.on_idle(state, now_s)
        case ev.SettingsChanged(settings=settings, ladder=ladder, anew=anew):
            return relaid(replace(state, settings=settings), ladder, anew=anew), ()
        case ev.TimerFired(timer=timer):
            return _on_timer(state, timer, now_s)
        case ev.DrainRequested() | ev.RestartRequested() | ev.ResumeRequested() | ev.StopRequested():
            return _on_request(state, event, now_s)
    return _on_bad_news(state, event, now_s)


def _on_bad_news(state: MachineState, event: ev.Event, now_s: float) -> Step:
    match event:
        case ev.SpawnFailed(text=text):
            return failing.on_spawn_failed(state, text, now_s)
        case ev.ProofFailed(text=text) if state.state is EngineState.PROVING:
            return failing.fail(state, text, now_s, kill=ev.KillHow.NOW)
        case ev.ProofRefused() if state.state is EngineState.PROVING or state.answering:
            return proving.on_refused(state, event, now_s)
        case ev.HangDetected(text=text, stopped=stopped):
            return failing.fail(state, text, now_s, kill=ev.KillHow.ABORT, outside=stopped)
        case ev.FatalLine(text=text):
            return failing.on_fatal_line(state, text, now_s)
        case ev.EngineEnding(text=text):
            return failing.on_ending(state, text, now_s)
        case ev.GpuLost(text=text) if state.uses_gpu:
            return failing.on_gpu_lost(state, text, now_s)
        case ev.EngineExited(text=text):
            return failing.on_exit(state, text, now_s)
        case ev.GroupEmpty() | ev.GroupStuck():
            return failing.on_group(state, event, now_s)
        case ev.Diagnosed():
            return failing.on_diagnosis(state, event, now_s)
    return state, ()


def _on_timer(state: MachineState, timer: ev.Timer, now_s: float) -> Step:
    match timer, state.state:
        case ev.Timer.START, EngineState.STARTING | EngineState.PROVING:
            return starting.on_late(state, now_s)
        case ev.Timer.SETTLE, _ if state.alive and state.failure is not None:
            return state, (ev.Kill(state.generation, ev.KillHow.NOW, state.failure.first_evidence, requested=False),)
        case ev.Timer.DRAIN, EngineState.DRAINING if not state.stopping and state.failure is None:
            return stopping.begin_stop(state, ev.KillHow.TERM)
        case ev.Timer.STOP, _ if state.alive and (state.stopping or state.failure is not None):
            return state, (ev.Kill(state.generation, ev.KillHow.NOW, "it did not end after SIGTERM", requested=state.stopping),)
        case ev.Timer.BACKOFF, EngineState.BACKOFF if state.failure is None and not state.alive:
            return again(state, now_s, state.sentence)
        case ev.Timer.STABLE, EngineState.SERVING | EngineState.DEGRADED:
            return replace(state, history=state.history.stable()), ()
        case ev.Timer.CLIMB, _:
            return stopping.on_climb(state, now_s)
    return state, ()


def _on_request(
    state: MachineState, event: ev.DrainRequested | ev.RestartRequested | ev.ResumeRequested | ev.StopRequested, now_s: float
) -> Step:
    match event:
        case ev.StopRequested(reason=reason, immediately=immediately):
            return stopping.on_stop(state, reason, immediately, now_s)
        case ev.RestartRequested():
            return stopping.on_restart(state, event, now_s)
        case ev.DrainRequested(reason=reason):
            return stopping.on_drain(state, reason, now_s)
        case ev.ResumeRequested(reason=reason):
            return stopping.on_resume(state, reason, now_s)
