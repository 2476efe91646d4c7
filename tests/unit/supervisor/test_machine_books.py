"""What the reducer writes down of a crash, and what it tells of it: the figures that incidents and history stand on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.history import Phase
from appliance.supervisor.machine import publication_of
from appliance.supervisor.machine.rungs import descended
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, LIMITS, Drive, make_diagnosis, make_rung, make_spec, make_state


def test_a_crash_under_a_drain_takes_the_engine_from_the_clients() -> None:
    """What drains is published; once it has failed, a request would go to a socket that nobody listens on."""
    drive = Drive().serving().give(ev.DrainRequested("x"))
    assert publication_of(drive.state).endpoint is not None
    drive.give(ev.FatalLine(1, "CUDA error"))
    assert drive.of(ev.Publish)[0].publication.endpoint is None


def test_a_recovery_takes_as_long_as_its_first_crash_is_ago() -> None:
    """The next life dies too before anybody was served: one outage, told at the first incident with its whole length."""
    drive = Drive().serving().crashed(Cause.KILLED_UNKNOWN)
    drive.give(ev.Planned(2, make_spec(2)), after_s=3.0).crashed(Cause.KILLED_UNKNOWN)
    drive.give(ev.TimerFired(2, ev.Timer.BACKOFF), after_s=1.0).started()
    assert drive.of(ev.RecordRecovery) == [ev.RecordRecovery("inc-1", pytest.approx(6.0))]


def test_a_start_that_fails_had_not_served() -> None:
    """However long it loaded: its uptime is none, and no fair trial."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()))
    drive.give(ev.EngineExited(1, "exit 1"), after_s=900.0)
    assert drive.state.failure is not None
    assert (drive.state.failure.phase, drive.state.failure.uptime_s) == (Phase.START, 0.0)
    served = Drive().serving().give(ev.EngineExited(1, "x"), after_s=900.0)
    assert served.state.failure is not None
    assert (served.state.failure.phase, served.state.failure.uptime_s) == (Phase.SERVING, 900.0)


def test_a_crash_is_held_against_the_rung_that_ran() -> None:
    """Another configuration was loaded while a safer rung served: not the new rung 0 has failed."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).started()
    drive.give(ev.SettingsChanged(MachineSettings(), LADDER, anew=True)).crashed(Cause.SEGFAULT_NATIVE)
    assert [(entry.cause, entry.setting) for entry in drive.state.history.tried] == [(Cause.SEGFAULT_NATIVE, LADDER[1].setting)]


def test_a_refused_proof_goes_where_its_own_offers_lead() -> None:
    """They were worked out when it was refused; the verdict brings none."""
    offer = make_rung(9, prefill_chunk_tokens=32)
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()), ev.EngineReady(1, LIMITS))
    verdict = make_diagnosis(Cause.OK_DEGRADED)
    drive.give(ev.ProofRefused(1, "short", verdict, (offer,)), ev.EngineExited(1, "killed"), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, verdict, "inc-1", 0.0))
    assert drive.state.rung.setting == offer.setting
    assert drive.of(ev.Plan) == [ev.Plan(2, replace(offer, index=1))]


@pytest.mark.parametrize("asked", [False, True])
def test_the_stop_ledger_knows_what_was_asked_for(asked: bool) -> None:
    """Its leader is gone and the rest is cleared away: after a drain that is our doing, after a crash it is not."""
    drive = Drive().serving()
    if asked:
        drive.give(ev.DrainRequested("x")).give(ev.Progress(1, 0, 0), after_s=1.0)
    drive.give(ev.EngineExited(1, "exit 0"))
    assert [kill.requested for kill in drive.of(ev.Kill)] == [asked]


def test_cards_that_are_lost_one_by_one_are_wanted_back_together() -> None:
    """Four, then two, then one: with all of them back after a reboot it is the rung that the owner configured."""
    ladder = tuple(make_rung(index, tensor_parallel=cards) for index, cards in enumerate((4, 2, 1)))
    drive = Drive(make_state(ladder=ladder)).give(ev.Started(), ev.GpuReady(4)).started()
    for left in (2, 1):
        g = drive.state.generation
        drive.give(ev.GpuLost("Xid 79"), ev.GroupEmpty(g)).give(ev.Diagnosed(g, make_diagnosis(Cause.GPU_OFF_BUS), f"inc-{g}", 0.0, left))
        drive.give(ev.GpuReady(left)).started()
    assert (drive.state.state, drive.state.history.rung, drive.state.history.wants) == (State.DEGRADED, 2, 0)
    again = Drive(make_state(ladder=ladder, history=drive.state.history, generation=3)).give(ev.Started(), ev.GpuReady(4)).started()
    assert (again.state.state, again.state.history.rung) == (State.SERVING, 0)


def test_what_was_told_of_a_crash_ends_when_it_serves() -> None:
    """The publication names the incident until then; Retry-After is what the last start took, and the wait on top of it."""
    drive = Drive().serving().crashed(Cause.KILLED_UNKNOWN)
    assert publication_of(drive.state).incident_id == "inc-1"
    g = drive.state.generation + 1
    drive.give(ev.Planned(g, make_spec(g)), ev.EngineReady(g, LIMITS)).give(ev.Proved(g), after_s=40.0)
    assert publication_of(drive.state).incident_id is None
    drive.crashed(Cause.KILLED_UNKNOWN)
    assert drive.state.delay_s == 1.0
    assert publication_of(drive.state).retry_after_s == 41.0


def test_a_wait_for_nothing_has_no_end() -> None:
    """Nobody is told to come again where a person has parked the box, or is about to."""
    drive = Drive().serving().give(ev.DrainRequested("x"))
    assert publication_of(drive.state).retry_after_s is None
    assert publication_of(Drive().serving().give(ev.RestartRequested("x")).state).retry_after_s is not None


def test_nothing_climbs_from_the_configured_rung() -> None:
    """No timer is set that has nothing to do."""
    drive = Drive(make_state(settings=MachineSettings(climb_after_s=60.0))).serving()
    assert {timer.timer for timer in drive.of(ev.SetTimer)} == {ev.Timer.STABLE}


def test_a_rung_that_a_person_chose_is_not_on_probation() -> None:
    """It had climbed by itself, then somebody wanted it so: a crash is judged as any other."""
    drive = Drive(make_state(settings=MachineSettings(climb_after_s=60.0))).serving().crashed(Cause.CUDA_OOM_PREFILL).started()
    drive.give(ev.TimerFired(2, ev.Timer.CLIMB), after_s=60.0).give(ev.Progress(2, 0, 0), after_s=1.0)
    drive.give(ev.EngineExited(2, "exit 0"), ev.GroupEmpty(2)).started()
    assert drive.state.history.climbed_from == 1
    drive.give(ev.RestartRequested("a person", 0)).give(ev.Progress(3, 0, 0), after_s=1.0)
    drive.give(ev.EngineExited(3, "exit 0"), ev.GroupEmpty(3)).started().crashed(Cause.SEGFAULT_NATIVE)
    assert (drive.state.history.rung, drive.state.history.failed_climbs) == (0, 0)


@pytest.mark.parametrize(
    "request_", [ev.RestartRequested("x"), ev.RestartRequested("x", 1), ev.DrainRequested("x"), ev.ResumeRequested("x")]
)
def test_nobody_takes_back_a_stop_under_which_the_engine_died(request_: ev.Event) -> None:
    """applianced ends when the group is empty, whatever is asked of it meanwhile."""
    drive = Drive().serving().give(ev.StopRequested("SIGTERM"), ev.EngineExited(1, "x"), request_, ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0))
    assert drive.state.state is State.STOPPED


def test_a_restart_does_not_start_beside_who_will_not_go() -> None:
    """The engine ignores SIGTERM and survives SIGKILL: parked, and no second one."""
    drive = Drive().serving().give(ev.RestartRequested("x")).give(ev.Progress(1, 0, 0), after_s=1.0)
    drive.give(ev.TimerFired(1, ev.Timer.STOP), ev.GroupStuck(1, "pid 9 in D"))
    assert (drive.state.state, drive.of(ev.Plan)) == (State.PARKED, [])
    assert "survive SIGKILL" in drive.state.sentence


def test_parked_and_resumed_is_another_story() -> None:
    """A second drain changes nothing; what comes after the resume is not the end of the incident that parked it."""
    drive = Drive().serving().crashed(Cause.MODEL_MISSING)
    assert (drive.state.state, drive.state.incident_id) == (State.PARKED, "inc-1")
    assert drive.give(ev.DrainRequested("x")).effects == ()
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"))
    for generation in (1, 2, 3):
        drive.give(ev.Planned(generation, make_spec(generation))).crashed(Cause.UNKNOWN).give(ev.TimerFired(generation, ev.Timer.BACKOFF))
    assert drive.state.state is State.PARKED
    drive.give(ev.ResumeRequested("a person"))
    assert drive.state.incident_id is None
    drive.give(ev.NoGpu("no card")).started()
    assert [effect for effect in drive.every if isinstance(effect, ev.RecordRecovery)] == []


@pytest.mark.parametrize("request_", [ev.DrainRequested("x"), ev.RestartRequested("x"), ev.StopRequested("x")])
def test_a_start_that_nobody_uses_is_not_waited_for(request_: ev.Event) -> None:
    """There are no answers to finish: SIGTERM at once."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec())).give(request_)
    assert [kill.how for kill in drive.of(ev.Kill)] == [ev.KillHow.TERM]


def test_the_second_stop_waits_for_no_verdict() -> None:
    """It died under its last answers; applianced ends as soon as nobody is left."""
    drive = Drive().serving().give(ev.StopRequested("SIGTERM"), ev.EngineExited(1, "x"), ev.StopRequested("SIGTERM", immediately=True))
    assert drive.give(ev.GroupEmpty(1)).of(ev.Exit) == [ev.Exit()]


def test_a_rung_that_is_gone_by_then_is_the_last_one() -> None:
    """It was chosen while another configuration's ladder was being worked out."""
    drive = Drive().serving().give(ev.RestartRequested("a person", 3), ev.SettingsChanged(MachineSettings(), LADDER[:2]))
    drive.give(ev.Progress(1, 0, 0), after_s=1.0).give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[1])]


def test_a_rung_that_was_chosen_of_another_configuration_is_forgotten() -> None:
    """The numbers of the old ladder mean nothing on the new one: the next engine begins on its rung 0."""
    drive = Drive().serving().give(ev.RestartRequested("a person", 3), ev.SettingsChanged(MachineSettings(), LADDER, anew=True))
    drive.give(ev.Progress(1, 0, 0), after_s=1.0).give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[0])]


def test_what_was_switched_off_on_the_way_is_off_on_fewer_cards_too() -> None:
    """The rung for one card stays the last one, without the feature that the crash was blamed on."""
    ladder = (make_rung(0, tensor_parallel=2), make_rung(1, tensor_parallel=1))
    chosen = make_rung(1, tensor_parallel=2, features_off=frozenset({"cuda_graph"}))
    last = descended(ladder, 0, (chosen,), chosen)[-1]
    assert (last.index, last.tensor_parallel, last.features_off) == (2, 1, frozenset({"cuda_graph"}))
