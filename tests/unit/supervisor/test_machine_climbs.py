"""The reducer: up the ladder again, by itself or by a person's word."""

from __future__ import annotations

from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.history import History
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, Drive, make_state


def climbing() -> Drive:
    """On rung 1 after an out of memory, with ladder.climb_after_s = 1 h."""
    state = make_state(settings=MachineSettings(climb_after_s=3600.0))
    return Drive(state).serving().crashed(Cause.CUDA_OOM_PREFILL).started()


def test_it_never_climbs_by_itself_unless_asked_to() -> None:
    """Off by default: no timer is set on a safer rung."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).started()
    assert ev.Timer.CLIMB not in {timer.timer for timer in drive.of(ev.SetTimer)}


def test_a_climb_that_holds() -> None:
    """One rung up through a drain, on probation until it is stable; then nothing reminds of it."""
    drive = climbing()
    assert ev.SetTimer(ev.Timer.CLIMB, 2, 3600.0) in drive.effects
    drive.give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=3600.0)
    assert drive.state.state is State.DRAINING
    assert "climbing back to rung 0" in drive.state.sentence
    drive.give(ev.Progress(2, 0, 0), after_s=1.0).give(ev.EngineExited(2, "exit 0"), ev.GroupEmpty(2)).started()
    assert drive.state.state is State.SERVING
    assert drive.state.history.climbed_from == 1
    drive.give(ev.TimerFired(3, ev.Timer.STABLE))
    assert drive.state.history == History()


def test_a_climb_that_does_not_hold_goes_straight_back_and_waits_twice_as_long() -> None:
    """On probation even a segfault is held against the climb; a kill from outside is not."""
    drive = climbing().give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=3600.0)
    drive.give(ev.TimerFired(2, ev.Timer.DRAIN), ev.EngineExited(2, "exit 0"), ev.GroupEmpty(2)).started()
    drive.crashed(Cause.KILLED_UNKNOWN).give(ev.TimerFired(3, ev.Timer.BACKOFF)).started()
    assert (drive.state.history.rung, drive.state.history.climbed_from) == (0, 1)
    drive.crashed(Cause.SEGFAULT_NATIVE).give(ev.TimerFired(4, ev.Timer.BACKOFF))
    assert (drive.state.history.rung, drive.state.history.climbed_from, drive.state.history.failed_climbs) == (1, None, 1)
    assert ev.SetTimer(ev.Timer.CLIMB, 5, 7200.0) in drive.started().effects


def test_there_is_no_climb_above_what_is_configured() -> None:
    """Another configuration was loaded while a safer rung served: the next engine begins on its rung 0, and nothing climbs past that."""
    drive = climbing().give(ev.SettingsChanged(MachineSettings(climb_after_s=3600.0), LADDER, anew=True))
    assert drive.state.history.rung == 0
    drive.give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=3600.0)
    assert (drive.state.state, drive.state.history.rung) == (State.DEGRADED, 0)


def test_a_person_may_choose_the_rung() -> None:
    """`appliancectl restart --rung 0` goes back to what is configured, from serving and from PARKED."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).started().give(ev.RestartRequested("a person", rung=0))
    drive.give(ev.TimerFired(2, ev.Timer.DRAIN), ev.EngineExited(2, "exit 0"), ev.GroupEmpty(2))
    assert drive.of(ev.Plan) == [ev.Plan(3, LADDER[0])]
    drive.started().crashed(Cause.MODEL_MISSING)
    assert drive.state.state is State.PARKED
    assert drive.give(ev.RestartRequested("a person", rung=2), ev.NoGpu("no card")).of(ev.Plan) == [ev.Plan(4, LADDER[2])]
