"""What the reducer's timers do, and when they do nothing any more; and the counters of the history."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.history import History, Phase
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, LIMITS, TWO_CARDS, Drive, make_spec, make_state


def starting(generation: int = 1) -> Drive:
    """An engine that loads."""
    return Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(generation, make_spec(generation)))


def test_a_load_that_goes_on_is_given_more_time_and_a_proof_is_not() -> None:
    """Past its start deadline: for as long as bytes or memory move, one stall at a time; one that answers has to answer the prompt."""
    drive = starting().give(ev.Loading(1), after_s=55.0).give(ev.TimerFired(1, ev.Timer.START), after_s=5.0)
    assert drive.effects == (ev.SetTimer(ev.Timer.START, 1, 30.0),)
    assert drive.give(ev.TimerFired(1, ev.Timer.START), after_s=30.0).of(ev.Kill)
    proving = starting().give(ev.Loading(1), ev.EngineReady(1, LIMITS), after_s=59.0).give(ev.TimerFired(1, ev.Timer.START), after_s=1.0)
    assert [kill.how for kill in proving.of(ev.Kill)] == [ev.KillHow.ABORT]


def test_what_the_last_life_loaded_is_not_this_ones() -> None:
    """It moved bytes a moment ago and died; the next one does nothing."""
    drive = starting().give(ev.Loading(1)).crashed(Cause.KILLED_UNKNOWN).give(ev.Planned(2, make_spec(2)))
    assert drive.give(ev.TimerFired(2, ev.Timer.START), after_s=20.0).of(ev.Kill)


def test_sigterm_is_sent_once() -> None:
    """A second one tells an engine not to wait for its answers: the end of the drain says nothing to one that was told, or is dead."""
    drive = Drive().serving().give(ev.DrainRequested("x")).give(ev.Progress(1, 0, 0), after_s=1.0)
    assert len(drive.of(ev.Kill)) == 1
    assert drive.give(ev.TimerFired(1, ev.Timer.DRAIN)).effects == ()
    drive = Drive().serving().give(ev.DrainRequested("x"), ev.FatalLine(1, "CUDA error"), ev.TimerFired(1, ev.Timer.DRAIN))
    assert drive.effects == ()


def test_who_was_stopped_by_a_signal_is_restarted_on_its_rung() -> None:
    """Again and again: it is no hang of the engine's own."""
    drive = Drive().serving()
    for generation in range(1, 6):
        drive.give(ev.HangDetected(generation, "no answer", stopped=True)).crashed(Cause.ENGINE_WATCHDOG)
        drive.give(ev.TimerFired(generation, ev.Timer.BACKOFF)).started()
    assert (drive.state.state, drive.state.history.rung, drive.state.history.tried) == (State.SERVING, 0, ())


def test_the_first_word_is_published() -> None:
    """Also where nothing has changed: systemd and the gateway hear it."""
    assert len(Drive().give(ev.Started()).of(ev.Publish)) == 1


def test_a_command_line_that_nobody_waits_for_starts_nothing() -> None:
    """Drained while it was made."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.DrainRequested("x"), ev.Planned(1, make_spec()))
    assert (drive.state.state, drive.of(ev.Spawn)) == (State.PARKED, [])


def test_what_is_about_another_life_or_was_said_already_changes_nothing() -> None:
    """A command line for a life that is not the next one; an engine that says twice that it is ready."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(7, make_spec(7)))
    assert (drive.state.state, drive.effects) == (State.PLANNING, ())
    drive.started()
    assert drive.give(ev.EngineReady(1, LIMITS)).effects == ()
    assert drive.state.state is State.SERVING


def test_an_engine_on_the_cpu_is_not_ended_for_a_card() -> None:
    """The last life was on a card; this one is not, for there is none any more."""
    drive = Drive(make_state(ladder=TWO_CARDS)).give(ev.Started(), ev.GpuReady(2)).started().crashed(Cause.KILLED_UNKNOWN)
    drive.give(ev.NoGpu("no card")).started().give(ev.GpuLost("Xid 79"))
    assert drive.state.state is State.SERVING


def test_a_box_without_a_usable_card_asks_for_its_reboot() -> None:
    """auto_reboot decides what comes of it."""
    assert Drive().give(ev.Started(), ev.CardsGone("lost: reboot")).of(ev.Reboot) == [ev.Reboot("lost: reboot")]


def test_starts_that_failed_before_it_served_are_forgotten() -> None:
    """Twice, then it serves, then twice again: three in a row is the budget."""
    drive = starting()
    for generation in (1, 2, 4, 5):
        drive.crashed(Cause.START_TIMEOUT).give(ev.TimerFired(generation, ev.Timer.BACKOFF))
        if generation == 2:
            drive.started().crashed(Cause.KILLED_UNKNOWN).give(ev.TimerFired(3, ev.Timer.BACKOFF))
        drive.give(ev.Planned(drive.state.generation + 1, make_spec(drive.state.generation + 1)))
    assert drive.state.state is State.STARTING
    drive.crashed(Cause.START_TIMEOUT)
    assert drive.state.state is State.PARKED


def test_a_climb_that_holds_is_not_held_up_by_those_that_did_not() -> None:
    """On the way up from a low rung: the next wait is a single one again; an hour on the rung it fell back to changes nothing."""
    assert replace(History(), rung=1, climbed_from=2, failed_climbs=3).stable().failed_climbs == 0
    assert replace(History(), rung=2, failed_climbs=3).stable().failed_climbs == 3


def test_a_setting_is_remembered_for_each_cause() -> None:
    """And not for what somebody did to it from outside."""
    history = History().with_failure(Cause.SEGFAULT_NATIVE, Phase.SERVING, LADDER[0])
    history = history.with_failure(Cause.HOST_OOM, Phase.SERVING, LADDER[0]).with_failure(Cause.SEGFAULT_NATIVE, Phase.SERVING, LADDER[0])
    assert [history.times(cause, LADDER[0]) for cause in (Cause.SEGFAULT_NATIVE, Cause.HOST_OOM)] == [2, 1]
    assert history.with_failure(Cause.HOST_OOM, Phase.SERVING, LADDER[0], outside=True).times(Cause.HOST_OOM, LADDER[0]) == 1


def test_a_resume_does_not_forget_what_a_lost_card_had() -> None:
    """Parked on the last card, resumed on it, and after a reboot all cards are there."""
    history = replace(History(), rung=4, wants=0).forgiven()
    again = Drive(make_state(ladder=TWO_CARDS, history=history, settings=MachineSettings())).give(ev.Started(), ev.GpuReady(2)).started()
    assert (again.state.state, again.state.history.rung, again.state.history.wants) == (State.SERVING, 0, None)
