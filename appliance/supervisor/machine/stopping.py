"""The reducer's part for what people and the service manager ask: drain, restart, resume, stop."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.states import EngineState
from appliance.core.units import format_duration
from appliance.supervisor import events as ev
from appliance.supervisor.machine.state import MachineState, Purpose, Step, again, leave, move, park

DRAIN_BLIND_S = 0.3
"""An idle engine right after DRAINING was published proves nothing: the gateway may have sent a request just before."""


def on_stop(state: MachineState, reason: str, immediately: bool, now_s: float) -> Step:
    """SIGTERM to applianced: drain, stop the engine, end. The second one: now."""
    if immediately:
        return _stop_now(state, reason, now_s)
    if state.failure is not None:
        return replace(state, purpose=Purpose.EXIT), ()  # the group is being emptied; its verdict ends the wait
    if not state.alive or not state.running:
        return leave(state, now_s)
    return _drain(state, Purpose.EXIT, f"stopping: {reason}", now_s)


def on_drain(state: MachineState, reason: str, now_s: float) -> Step:
    """Let what runs finish, then wait for `resume`."""
    if state.failure is not None:
        return replace(state, purpose=Purpose.EXIT if state.purpose is Purpose.EXIT else Purpose.PARK), ()
    if not state.alive and state.state is not EngineState.PARKED:
        return park(state, f"drained: {reason}; appliancectl resume starts the engine", now_s)
    return _drain(state, Purpose.PARK, f"draining: {reason}", now_s)


def on_restart(state: MachineState, event: ev.RestartRequested, now_s: float) -> Step:
    """A new life: after what runs has finished, or at once where nothing runs."""
    reason = event.reason
    if state.purpose is Purpose.EXIT:
        return state, ()
    if event.rung is not None:
        # A person chose it: a probation that was under way is over, and what was wanted before does not count.
        state = replace(state, next_rung=event.rung, history=replace(state.history, climbed_from=None, wants=None))
    if state.state is EngineState.PARKED:
        return on_resume(state, reason, now_s)
    if state.state is EngineState.BACKOFF and state.failure is None and not state.alive:
        return again(state, now_s, f"restarting the engine without further wait: {reason}")
    if state.failure is not None and event.rung is not None:
        return replace(state, purpose=Purpose.RESTART), ()  # what the verdict would call for is not what is wanted
    return _drain(state, Purpose.RESTART, f"restarting the engine: {reason}", now_s)


def on_climb(state: MachineState, now_s: float) -> Step:
    """ladder.climb_after_s without a crash: one rung up, on probation until it is stable."""
    if state.state is not EngineState.DEGRADED or not state.history.rung:
        return state, ()  # another configuration was loaded meanwhile: the next engine is on its rung 0 anyway
    climbed = state.history.climbed()
    if state.uses_gpu and state.ladder[climbed.rung].tensor_parallel > state.cards:
        return state, ()  # it would be started anew where it is: that rung wants a card that is lost
    waited = format_duration(now_s - state.since_s)
    sentence = (
        f"climbing back to rung {climbed.rung} because rung {state.history.rung} served {waited} without a crash (ladder.climb_after_s)"
    )
    return _drain(replace(state, history=climbed), Purpose.RESTART, sentence, now_s)


def on_resume(state: MachineState, reason: str, now_s: float) -> Step:
    """Leave PARKED with every budget whole again; a drain that is still under way ends in a new life instead."""
    if state.purpose is Purpose.PARK and state.failure is not None:
        return replace(state, purpose=Purpose.RESTART), ()  # it died under its last answers, and its group is being emptied
    if state.purpose is Purpose.PARK:
        return _drain(state, Purpose.RESTART, f"restarting the engine, which is being drained: {reason}", now_s)
    if state.state is not EngineState.PARKED:
        return state, ()
    if state.alive:
        return replace(state, sentence="still parked because the old engine's processes survive SIGKILL; to do: reboot"), ()
    resumed = replace(state, history=state.history.forgiven(), incident_id=None, basis="")
    return move(resumed, EngineState.WAITING_FOR_GPU, now_s, f"trying again: {reason}"), (ev.WaitForGpu(),)


def on_idle(state: MachineState, now_s: float) -> Step:
    """Nothing runs any more: a drain is done."""
    draining = state.state is EngineState.DRAINING and not state.stopping and state.failure is None
    if draining and now_s - state.since_s >= DRAIN_BLIND_S:
        return begin_stop(state, ev.KillHow.TERM)
    return state, ()


def begin_stop(state: MachineState, how: ev.KillHow) -> Step:
    """Tell the engine to go. From here on its death is no crash."""
    kill = ev.Kill(state.generation, how, state.sentence, requested=True)
    timer = ev.SetTimer(ev.Timer.STOP, state.generation, state.settings.stop_deadline_s)
    return replace(state, stopping=True), (kill, timer) if how is ev.KillHow.TERM else (kill,)


def finish_stop(state: MachineState, now_s: float) -> Step:
    """The group is gone (or stuck for good) and somebody had asked for that."""
    done = replace(state, purpose=None, stopping=False, limits=None)
    if state.purpose is Purpose.EXIT:
        return leave(done, now_s)
    if state.alive:
        return park(done, f"parked because the engine's processes survive SIGKILL; to do: reboot ({state.sentence})", now_s)
    if state.purpose is Purpose.PARK:
        return park(done, f"drained ({state.sentence}); appliancectl resume starts the engine", now_s)
    if state.state is EngineState.DRAINING:
        done = move(done, EngineState.BACKOFF, now_s, state.sentence)
    return again(done, now_s, state.sentence)


def _drain(state: MachineState, purpose: Purpose, sentence: str, now_s: float) -> Step:
    if not state.running or state.purpose is Purpose.EXIT:
        return state, ()  # nothing to drain; and a stop of applianced itself is never taken back
    if state.state is EngineState.DRAINING:
        return replace(state, purpose=purpose, sentence=sentence), ()
    clients = state.answering
    draining = move(state, EngineState.DRAINING, now_s, sentence, purpose=purpose, limits=state.limits if clients else None)
    if clients:
        return draining, (ev.SetTimer(ev.Timer.DRAIN, state.generation, state.settings.drain_s),)
    return begin_stop(draining, ev.KillHow.TERM)


def _stop_now(state: MachineState, reason: str, now_s: float) -> Step:
    if not state.alive or not state.running:
        return leave(state, now_s)  # SIGKILL was sent already; PDEATHSIG and the service manager clear the rest
    sentence = f"stopping now: {reason}"
    ending = state if state.state is EngineState.DRAINING else move(state, EngineState.DRAINING, now_s, sentence)
    return begin_stop(replace(ending, purpose=Purpose.EXIT, failure=None, sentence=sentence), ev.KillHow.NOW)
