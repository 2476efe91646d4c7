"""The reducer where two things come together: what a person asks while something fails, and what fails while something else ends."""

from __future__ import annotations

import pytest

from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.machine import publication_of
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, LIMITS, TWO_CARDS, Drive, make_diagnosis, make_spec, make_state


def on_two_cards(**settings: float) -> Drive:
    """Serving on both."""
    return Drive(make_state(ladder=TWO_CARDS, settings=MachineSettings(**settings))).give(ev.Started(), ev.GpuReady(2)).started()  # type: ignore[arg-type]


def lost(drive: Drive, cards_left: int, *, stuck: bool = False) -> Drive:
    """The rest of a lost card: the group goes or stays, and the verdict is in."""
    g = drive.state.generation
    drive.give(ev.GroupStuck(g, "pid 9 in D") if stuck else ev.GroupEmpty(g))
    return drive.give(ev.Diagnosed(g, make_diagnosis(Cause.GPU_OFF_BUS), f"inc-{g}", 0.0, cards_left))


@pytest.mark.parametrize("stuck", [False, True])
def test_a_card_that_is_lost_under_a_restart_is_not_started_on(stuck: bool) -> None:
    """Xid 79 while the last answers finish: the restart goes to the card that is left, whether or not a corpse stays on the other."""
    drive = on_two_cards().give(ev.RestartRequested("a person"), ev.GpuLost("Xid 79"))
    lost(drive, 1, stuck=stuck)
    assert drive.state.state is State.WAITING_FOR_GPU
    assert drive.of(ev.RecordIncident)[0].action.kind is ActionKind.USE_REMAINING_GPU
    assert bool(drive.of(ev.Abandon)) is stuck
    drive.give(ev.GpuReady(1))
    assert drive.of(ev.Plan) == [ev.Plan(2, TWO_CARDS[4])]


def test_the_only_card_lost_under_a_restart_parks() -> None:
    """An engine on it would hang; auto_reboot is asked as ever."""
    drive = lost(on_two_cards().give(ev.RestartRequested("a person"), ev.GpuLost("Xid 79")), 0)
    assert drive.state.state is State.PARKED
    assert len(drive.of(ev.Reboot)) == 1


def test_a_lost_card_does_not_undo_a_drain() -> None:
    """What is wanted is that nothing runs."""
    drive = lost(on_two_cards().give(ev.DrainRequested("a person"), ev.GpuLost("Xid 79")), 1)
    assert drive.state.state is State.PARKED
    assert "drained" in drive.state.sentence


@pytest.mark.parametrize("asked", ["restart", "climb", "back-off"])
def test_every_life_on_a_card_begins_with_a_look_at_the_cards(asked: str) -> None:
    """One may be lost by now, and the memory of the life before may still be held: also where the next one was asked for."""
    drive = on_two_cards(climb_after_s=60.0)
    if asked == "restart":
        drive.give(ev.RestartRequested("a person"))
    elif asked == "climb":
        drive.crashed(Cause.CUDA_OOM_PREFILL).give(ev.GpuReady(2)).started().give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=60.0)
    else:
        drive.crashed(Cause.DRIVER_NOT_READY).give(ev.RestartRequested("a person"))
    if asked != "back-off":
        g = drive.state.generation
        drive.give(ev.Progress(g, 0, 0), after_s=1.0).give(ev.EngineExited(g, "exit 0"), ev.GroupEmpty(g))
    assert drive.state.state is State.WAITING_FOR_GPU
    assert drive.of(ev.WaitForGpu) == [ev.WaitForGpu()]


def test_a_card_that_is_lost_before_the_start_is_planned_for_anew() -> None:
    """The command line was made for two."""
    drive = Drive(make_state(ladder=TWO_CARDS)).give(ev.Started(), ev.GpuReady(2), ev.GpuLost("Xid 79"))
    assert drive.of(ev.WaitForGpu) == [ev.WaitForGpu()]
    assert drive.give(ev.Planned(1, make_spec(1, TWO_CARDS[0]))).effects == ()
    assert drive.give(ev.GpuReady(1)).of(ev.Plan) == [ev.Plan(1, TWO_CARDS[4])]


def test_nothing_climbs_to_a_rung_that_wants_a_lost_card() -> None:
    """The engine would be ended for one on the same rung, each climb_after; and its next crash be taken for one on probation."""
    drive = lost(on_two_cards(climb_after_s=60.0).give(ev.GpuLost("Xid 79")), 1).give(ev.GpuReady(1)).started()
    assert drive.state.history.rung == 4
    drive.give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=60.0)
    assert (drive.state.state, drive.state.history.rung, drive.state.history.climbed_from) == (State.DEGRADED, 4, None)


def test_a_card_that_is_lost_on_probation_ends_the_probation() -> None:
    """Else the next crash would fall back to a rung that the cards that are left cannot have."""
    drive = on_two_cards(climb_after_s=60.0).crashed(Cause.CUDA_OOM_PREFILL).give(ev.GpuReady(2)).started()
    drive.give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=60.0).give(ev.Progress(2, 0, 0), after_s=1.0)
    drive.give(ev.EngineExited(2, "exit 0"), ev.GroupEmpty(2), ev.GpuReady(2)).started()
    assert (drive.state.history.rung, drive.state.history.climbed_from) == (0, 1)
    lost(drive.give(ev.GpuLost("Xid 79")), 1).give(ev.GpuReady(1)).started()
    assert (drive.state.history.rung, drive.state.history.climbed_from, drive.state.history.wants) == (4, None, 0)


@pytest.mark.parametrize(
    ("news", "how"),
    [(ev.FatalLine(1, "CUDA error"), None), (ev.HangDetected(1, "no progress"), ev.KillHow.ABORT), (ev.GpuLost("Xid 79"), ev.KillHow.NOW)],
)
def test_one_that_leaves_by_itself_and_breaks_is_not_waited_for(news: ev.Event, how: ev.KillHow | None) -> None:
    """Somebody sent it SIGTERM, and under its last answers it fails: stop_deadline_s is for answers, and there will be none."""
    drive = on_two_cards().give(ev.EngineEnding(1, "draining"))
    assert drive.of(ev.Kill) == []
    drive.give(news)
    if how is None:
        assert [timer.timer for timer in drive.of(ev.SetTimer)] == [ev.Timer.SETTLE]
        drive.give(ev.TimerFired(1, ev.Timer.SETTLE))
        how = ev.KillHow.NOW
    assert [kill.how for kill in drive.of(ev.Kill)] == [how]
    assert drive.give(news).effects == (), "once"
    assert drive.state.failure is not None
    assert drive.state.failure.first_evidence == "draining"


def test_leaving_is_of_one_life() -> None:
    """The next one fails for the first time as any other; told twice that it leaves, it still has its deadline once."""
    drive = Drive().serving().give(ev.EngineEnding(1, "draining"))
    assert drive.give(ev.EngineEnding(1, "draining")).effects == ()
    drive.give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1)).give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0)).started()
    drive.give(ev.HangDetected(2, "no progress"))
    assert drive.state.failure is not None
    assert drive.state.state is State.BACKOFF


def test_the_last_word_of_a_person_counts() -> None:
    """Restart, a crash under its last answers, then drain: parked. A stop of applianced alone is never taken back."""
    drive = Drive().serving().give(ev.RestartRequested("x"), ev.EngineExited(1, "x"), ev.DrainRequested("maintenance"), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0))
    assert drive.state.state is State.PARKED
    drive = Drive().serving().give(ev.StopRequested("SIGTERM"), ev.EngineExited(1, "x"), ev.DrainRequested("maintenance"), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0))
    assert drive.state.state is State.STOPPED


def test_a_rung_that_is_chosen_while_recovering_is_what_is_done_and_told() -> None:
    """`restart --rung original` before the verdict: not on the rung that the verdict calls for, and the incident does not say so."""
    drive = Drive().serving().give(ev.EngineExited(1, "x"), ev.RestartRequested("a person", 0), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(Cause.CUDA_OOM_PREFILL), "inc-1", 0.0))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[0])]
    (record,) = drive.of(ev.RecordIncident)
    assert (record.action.kind, record.rung_after) == (ActionKind.NONE, 0)
    assert "the restart that was asked for" in record.action.basis


def test_a_rung_that_is_chosen_while_another_is_planned_is_the_next_one() -> None:
    """It was remembered for the life after: a crash weeks later would have gone there."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).give(ev.RestartRequested("a person", 2))
    drive.give(ev.Planned(2, make_spec(2, LADDER[1])))
    assert drive.of(ev.Spawn) == []
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[2])]
    drive.give(ev.Planned(2, make_spec(2, LADDER[2])), ev.EngineReady(2, LIMITS), ev.Proved(2))
    assert (drive.state.state, drive.state.history.rung, drive.state.next_rung) == (State.DEGRADED, 2, None)
    assert publication_of(drive.state).endpoint is not None
