"""The reducer, story by story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.history import History, Phase
from appliance.supervisor.machine import MachineState, publication_of
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, LIMITS, Drive, make_diagnosis, make_spec, make_state


def test_a_start_on_the_cpu_ends_in_serving() -> None:
    """No card: go on with the CPU, plan, start, prove, serve; nothing is published to clients before the proof."""
    drive = Drive().serving()
    assert drive.visited[-1] is State.SERVING
    endpoints = [effect.publication.endpoint for effect in drive.every if isinstance(effect, ev.Publish)]
    assert endpoints[:-1] == [None] * (len(endpoints) - 1)
    assert str(endpoints[-1]) == "unix:/run/engine-1.sock"
    assert publication_of(drive.state).limits == LIMITS


def test_the_generation_is_saved_before_the_engine_is_started() -> None:
    """A kill -9 of applianced right after the start may not make the generation go back."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()))
    kinds = [type(effect) for effect in drive.effects]
    assert kinds.index(ev.SaveHistory) < kinds.index(ev.Spawn)
    assert drive.of(ev.SaveHistory) == [ev.SaveHistory(History(), 1)]


def test_gpu_required_parks_without_a_card() -> None:
    """gpu.mode = required never serves on the CPU, and says which key to change."""
    drive = Drive(make_state(settings=MachineSettings(gpu_required=True))).give(ev.Started(), ev.NoGpu("no NVIDIA card"))
    assert drive.state.state is State.PARKED
    assert "gpu.mode" in drive.state.sentence


def test_waiting_for_the_gpu_tells_the_reason() -> None:
    """What is waited for is published, each time it changes and only then."""
    drive = Drive().give(ev.Started(), ev.GpuWaiting("no driver"))
    assert "no driver" in drive.of(ev.Publish)[0].publication.reason
    assert drive.give(ev.GpuWaiting("no driver")).effects == ()
    assert drive.give(ev.GpuReady(2)).state.state is State.PLANNING


def test_first_crash_restarts_at_once() -> None:
    """kill -9: clients are held at once, the group is cleared, and the next life starts in the same turn as the verdict."""
    drive = Drive().serving().give(ev.EngineExited(1, "killed by SIGKILL"))
    assert drive.state.state is State.BACKOFF
    assert drive.of(ev.Publish)[0].publication.endpoint is None
    assert [kill.how for kill in drive.of(ev.Kill)] == [ev.KillHow.NOW]
    assert drive.give(ev.GroupEmpty(1)).of(ev.Diagnose) == [ev.Diagnose(1)]
    drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.5))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[0])]
    record = drive.of(ev.RecordIncident)[0]
    assert record.action.kind is ActionKind.RESTART_SAME
    assert record.failure.phase is Phase.SERVING
    assert "because" in record.action.basis
    drive.started()
    assert drive.state.state is State.SERVING
    assert drive.of(ev.RecordRecovery) == [ev.RecordRecovery("inc-1", pytest.approx(2.0))]


def test_a_fatal_line_does_not_wait_for_death() -> None:
    """A server that lingers after its fatal line is killed once the lines that explain it have arrived."""
    drive = Drive().serving().give(ev.FatalLine(1, "CUDA error"))
    assert drive.state.state is State.BACKOFF
    assert drive.of(ev.SetTimer)[0].timer is ev.Timer.SETTLE
    assert [kill.how for kill in drive.give(ev.TimerFired(1, ev.Timer.SETTLE)).of(ev.Kill)] == [ev.KillHow.NOW]


def test_only_the_first_evidence_opens_an_incident() -> None:
    """The exit after a fatal line, or a second line, is the same crash."""
    drive = Drive().serving().give(ev.FatalLine(1, "first"), ev.FatalLine(1, "second"), ev.EngineExited(1, "exit 1"))
    assert drive.state.failure is not None
    assert drive.state.failure.first_evidence == "first"


def test_a_hang_is_aborted_for_its_stacks() -> None:
    """A hung engine gets SIGABRT first: its stacks are evidence."""
    drive = Drive().serving().give(ev.HangDetected(1, "no progress for 10 s"))
    assert [kill.how for kill in drive.of(ev.Kill)] == [ev.KillHow.ABORT]


def test_an_engine_that_ends_by_itself_may_finish_its_answers() -> None:
    """Somebody sent it SIGTERM: new requests are held at once, it is not killed before its deadline, and it is an incident."""
    drive = Drive().serving().give(ev.EngineEnding(1, "draining"))
    assert drive.state.state is State.BACKOFF
    assert drive.of(ev.SetTimer) == [ev.SetTimer(ev.Timer.STOP, 1, 30.0)]
    assert drive.of(ev.Kill) == []
    assert [kill.how for kill in drive.give(ev.TimerFired(1, ev.Timer.STOP)).of(ev.Kill)] == [ev.KillHow.NOW]
    drive.give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.of(ev.Diagnose) == [ev.Diagnose(1)]


def test_back_off_waits_and_the_wait_can_be_cut_short() -> None:
    """The second failure in a row waits; `appliancectl restart` does not."""
    drive = Drive().serving().crashed(Cause.KILLED_UNKNOWN).started().crashed(Cause.KILLED_UNKNOWN)
    assert drive.state.state is State.BACKOFF
    assert drive.of(ev.SetTimer) == [ev.SetTimer(ev.Timer.BACKOFF, 2, 1.0)]
    assert drive.give(ev.RestartRequested("now")).of(ev.Plan) == [ev.Plan(3, LADDER[0])]
    assert drive.give(ev.TimerFired(2, ev.Timer.BACKOFF)).effects == ()


def test_out_of_memory_goes_to_a_safer_rung() -> None:
    """The rung moves, the state is DEGRADED, and the sentence says what was given up."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).started()
    assert drive.state.state is State.DEGRADED
    assert drive.state.history.rung == 1
    assert "rung 1" in drive.state.sentence


def test_failed_starts_park() -> None:
    """Three failed starts: PARKED, the hook runs, applianced stays up; resume tries again with whole budgets."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"))
    for generation in (1, 2, 3):
        drive.give(ev.Planned(generation, make_spec(generation))).crashed(Cause.UNKNOWN)
        drive.give(ev.TimerFired(generation, ev.Timer.BACKOFF))
    assert drive.state.state is State.PARKED
    assert [type(effect) for effect in drive.every].count(ev.RunHook) == 1
    assert publication_of(drive.state).retry_after_s is None
    drive.give(ev.ResumeRequested("a person"))
    assert drive.state.state is State.WAITING_FOR_GPU
    assert drive.state.history.start_failures == 0
    assert drive.give(ev.NoGpu("no card")).of(ev.Plan)[0].generation == 4


def test_a_failed_proof_is_a_failed_start() -> None:
    """It answered /health and no prompt: clients never saw it."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()), ev.EngineReady(1, LIMITS))
    drive.give(ev.ProofFailed(1, "500"))
    assert drive.state.failure is not None
    assert drive.state.failure.phase is Phase.START


def test_the_start_deadline_fails_a_start() -> None:
    """Neither ready nor dead by its deadline: ended with its stacks."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()))
    assert ev.SetTimer(ev.Timer.START, 1, 60.0) in drive.effects
    assert [kill.how for kill in drive.give(ev.TimerFired(1, ev.Timer.START)).of(ev.Kill)] == [ev.KillHow.ABORT]


def test_what_cannot_be_planned_parks_with_an_incident() -> None:
    """A missing model is nothing that trying again would cure."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.PlanFailed(1, make_diagnosis(Cause.MODEL_MISSING), "inc-1"))
    assert drive.state.state is State.PARKED
    assert drive.of(ev.RecordIncident)[0].diagnosis.cause is Cause.MODEL_MISSING
    assert drive.state.incident_id == "inc-1"


def test_a_runtime_that_is_gone_is_left_for_the_one_that_served() -> None:
    """At once, with the incident; as often as starts may fail, should the link be stuck. The served one's own trouble is a person's."""
    gone = ev.PlanFailed(1, make_diagnosis(Cause.ENGINE_CONFIG), "inc-1", "native-2")
    drive = Drive(replace(make_state(), history=History(runtime="native-1"))).give(ev.Started(), ev.NoGpu("no card"), gone)
    assert drive.of(ev.UseRuntime) == [ev.UseRuntime("native-1")]
    assert drive.of(ev.RecordIncident)[0].action.kind is ActionKind.ROLL_BACK
    assert drive.state.state is State.PLANNING
    drive.give(*(replace(gone, incident_id=f"inc-{number}") for number in range(2, 9)))
    assert drive.state.state is State.PARKED
    served = Drive(replace(make_state(), history=History(runtime="native-1"))).give(
        ev.Started(), ev.NoGpu("no card"), replace(gone, runtime="native-1")
    )
    assert served.state.state is State.PARKED


def test_a_spawn_that_fails_is_diagnosed() -> None:
    """exec failed: no group to wait for, straight to the verdict."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"), ev.Planned(1, make_spec()), ev.SpawnFailed(1, "no such file"))
    assert drive.of(ev.Diagnose) == [ev.Diagnose(1)]
    assert not drive.state.alive


def test_drain_waits_for_what_runs() -> None:
    """DRAINING keeps the endpoint for what runs; idle ends it; the engine's death is then no incident; resume starts again."""
    drive = Drive().serving().give(ev.DrainRequested("maintenance"))
    assert publication_of(drive.state).endpoint is not None
    assert drive.give(ev.Progress(1, running=0, waiting=0)).state.stopping is False, "too early: the gateway may just have sent one"
    assert drive.give(ev.Progress(1, running=1, waiting=0), after_s=1.0).state.stopping is False
    assert [kill.how for kill in drive.give(ev.Progress(1, running=0, waiting=0)).of(ev.Kill)] == [ev.KillHow.TERM]
    assert publication_of(drive.state).endpoint is None
    drive.give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.state.state is State.PARKED
    assert not [effect for effect in drive.every if isinstance(effect, ev.RecordIncident)]
    drive.give(ev.ResumeRequested("a person"), ev.NoGpu("no card")).started()
    assert drive.state.state is State.SERVING


def test_a_drain_that_is_taken_back_ends_in_a_new_life() -> None:
    """`resume` while what runs still finishes: it was answered and forgotten, and the engine ended parked."""
    drive = Drive().serving().give(ev.DrainRequested("maintenance"), ev.ResumeRequested("a person"))
    assert publication_of(drive.state).endpoint is not None
    assert "a person" in drive.state.sentence
    drive.give(ev.Progress(1, running=0, waiting=0), after_s=1.0).give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[0])]
    assert drive.started().state.state is State.SERVING


def test_a_drain_that_is_taken_back_after_a_crash_does_not_park() -> None:
    """The engine died under the last answers: an incident, and then another life, for that is what is wanted now."""
    drive = Drive().serving().give(ev.DrainRequested("x"), ev.EngineExited(1, "killed by SIGSEGV"), ev.ResumeRequested("a person"))
    drive.give(ev.GroupEmpty(1)).give(ev.Diagnosed(1, make_diagnosis(Cause.SEGFAULT_NATIVE), "inc-1", 0.0))
    assert drive.state.state is not State.PARKED


def test_a_drain_has_a_deadline() -> None:
    """An answer that never ends is cut off; an engine that ignores SIGTERM is killed."""
    drive = Drive().serving().give(ev.DrainRequested("x"))
    assert drive.of(ev.SetTimer) == [ev.SetTimer(ev.Timer.DRAIN, 1, 30.0)]
    assert [kill.how for kill in drive.give(ev.TimerFired(1, ev.Timer.DRAIN)).of(ev.Kill)] == [ev.KillHow.TERM]
    assert [kill.how for kill in drive.give(ev.TimerFired(1, ev.Timer.STOP)).of(ev.Kill)] == [ev.KillHow.NOW]


def test_restart_drains_and_starts_the_next_life() -> None:
    """`appliancectl restart` is no incident and counts one life."""
    drive = Drive().serving().give(ev.RestartRequested("a person")).give(ev.Progress(1, 0, 0), after_s=1.0)
    drive.give(ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[0])]
    assert drive.started().state.restarts == 1
    assert not [effect for effect in drive.every if isinstance(effect, ev.RecordIncident)]


def test_a_crash_during_a_drain_is_recorded_and_the_drain_goes_on() -> None:
    """The engine died under the last answers: that is an incident, and what was asked for still happens."""
    drive = Drive().serving().give(ev.DrainRequested("x"), ev.EngineExited(1, "killed by SIGSEGV"), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(Cause.SEGFAULT_NATIVE), "inc-1", 0.0))
    assert drive.state.state is State.PARKED
    assert drive.of(ev.RecordIncident)[0].action.kind is ActionKind.NONE


def test_the_first_evidence_counts_during_a_drain_too() -> None:
    """A fatal line and the exit that follows it are one crash, also while draining."""
    drive = Drive().serving().give(ev.DrainRequested("x"), ev.FatalLine(1, "first"), ev.EngineExited(1, "exit 1"))
    assert drive.state.failure is not None
    assert drive.state.failure.first_evidence == "first"
    assert drive.state.failure.phase is Phase.SERVING


@pytest.mark.parametrize("stage", ["waiting", "planning", "starting", "serving", "backoff", "parked"])
def test_stop_ends_in_stopped_from_everywhere(stage: str) -> None:
    """SIGTERM to applianced: no state holds it up, and it exits only when the engine is gone."""
    drive = Drive()
    if stage != "waiting":
        drive.give(ev.Started(), ev.NoGpu("no card"))
    if stage in ("starting", "serving", "backoff", "parked"):
        drive.give(ev.Planned(1, make_spec()))
    if stage in ("serving", "backoff"):
        drive.give(ev.EngineReady(1, LIMITS), ev.Proved(1))
    if stage == "backoff":
        drive.give(ev.EngineExited(1, "x"))
    if stage == "parked":
        drive.crashed(Cause.MODEL_MISSING)
        assert drive.state.state is State.PARKED
    drive.give(ev.StopRequested("SIGTERM"))
    if drive.state.alive:
        assert not drive.of(ev.Exit)
        drive.give(ev.TimerFired(1, ev.Timer.DRAIN), ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
        drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0)) if drive.state.state is not State.STOPPED else None
    assert drive.state.state is State.STOPPED
    assert drive.of(ev.Exit)


def test_second_stop_is_immediate() -> None:
    """The second SIGTERM kills at once instead of waiting for answers."""
    drive = Drive().serving().give(ev.StopRequested("SIGTERM"), ev.StopRequested("SIGTERM", immediately=True))
    assert [kill.how for kill in drive.of(ev.Kill)] == [ev.KillHow.NOW]
    assert drive.give(ev.GroupEmpty(1)).of(ev.Exit)


def test_a_stop_is_not_taken_back() -> None:
    """A restart or drain asked for while applianced stops changes nothing."""
    drive = Drive().serving().give(ev.StopRequested("SIGTERM"), ev.RestartRequested("x"), ev.DrainRequested("x"))
    drive.give(ev.TimerFired(1, ev.Timer.DRAIN), ev.EngineExited(1, "exit 0"), ev.GroupEmpty(1))
    assert drive.state.state is State.STOPPED


def test_drain_during_a_crash_parks_after_the_verdict() -> None:
    """A drain that arrives between the crash and its verdict is honoured: no restart."""
    drive = Drive().serving().give(ev.EngineExited(1, "x"), ev.DrainRequested("maintenance"), ev.GroupEmpty(1))
    drive.give(ev.Diagnosed(1, make_diagnosis(), "inc-1", 0.0))
    assert drive.state.state is State.PARKED
    assert not drive.of(ev.Plan)


def test_an_unkillable_engine_is_never_joined_by_a_second_one() -> None:
    """D state: PARKED, resume refuses with the reason until the kernel lets go."""
    drive = Drive().serving().give(ev.EngineExited(1, "x"), ev.GroupStuck(1, "pid 7 in state D"))
    drive.give(ev.Diagnosed(1, make_diagnosis(Cause.UNKNOWN), "inc-1", 0.0))
    assert drive.state.state is State.PARKED
    assert drive.give(ev.ResumeRequested("x")).state.state is State.PARKED
    assert "SIGKILL" in drive.state.sentence
    assert drive.give(ev.GroupEmpty(1), ev.ResumeRequested("x")).state.state is State.WAITING_FOR_GPU


def test_a_lost_card_ends_only_an_engine_that_uses_one() -> None:
    """Xid 79 on a box that serves on the CPU is context; on a box that serves on the card it is the end of this life."""
    assert Drive().serving().give(ev.GpuLost("Xid 79")).state.state is State.SERVING
    drive = Drive().give(ev.Started(), ev.GpuReady(1)).started().give(ev.GpuLost("Xid 79"))
    assert drive.state.state is State.BACKOFF
    drive.give(ev.GroupEmpty(1), ev.Diagnosed(1, make_diagnosis(Cause.GPU_OFF_BUS), "inc-1", 0.0))
    assert drive.state.state is State.PARKED


def test_events_of_an_older_life_are_dropped() -> None:
    """The exit of generation 1 cannot hurt generation 2."""
    drive = Drive().serving().crashed(Cause.KILLED_UNKNOWN).started()
    for stale in (ev.EngineExited(1, "x"), ev.GroupEmpty(1), ev.HangDetected(1, "x"), ev.TimerFired(1, ev.Timer.START)):
        assert drive.give(stale).effects == ()
    assert drive.state.state is State.SERVING


def test_a_stable_time_forgives() -> None:
    """After stable_after_s nothing is held against any rung, but the rung stays, and what failed above it is not forgotten."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL).started()
    assert ev.SetTimer(ev.Timer.STABLE, 2, 3600.0) in drive.effects
    drive.give(ev.TimerFired(2, ev.Timer.STABLE))
    history = drive.state.history
    assert (history.rung, history.failures, history.below) == (1, 0, LADDER[1:])
    assert [(entry.setting, entry.times) for entry in history.tried] == [(LADDER[0].setting, 0)]


def test_a_reload_keeps_the_engine_and_fits_the_rung() -> None:
    """New numbers at once; a shorter ladder may not leave the rung past its end."""
    drive = Drive(make_state(history=History(rung=3)))
    drive.give(ev.SettingsChanged(MachineSettings(start_failures_max=9), LADDER[:2]))
    assert (drive.state.history.rung, drive.state.settings.start_failures_max) == (1, 9)


def test_the_story_of_a_crash_is_told_until_clients_are_served() -> None:
    """While the next life loads, the sentence still says what happened and why."""
    drive = Drive().serving().crashed(Cause.CUDA_OOM_PREFILL)
    drive.give(ev.Planned(2, make_spec(2)))
    assert "rung 1" in drive.state.sentence
    assert Cause.CUDA_OOM_PREFILL.definition in drive.state.sentence
    state: MachineState = drive.give(ev.EngineReady(2, LIMITS), ev.Proved(2)).state
    assert Cause.CUDA_OOM_PREFILL.definition not in state.sentence


def test_a_new_runtime_that_does_not_start_is_left_before_the_next_plan() -> None:
    """The one that served is remembered; the next life is planned once it is in force again, and serves on the rung it had."""
    drive = Drive().give(ev.Started(), ev.NoGpu("no card"))
    drive.give(ev.Planned(1, replace(make_spec(1), runtime="native-1")), ev.EngineReady(1, LIMITS), ev.Proved(1))
    assert drive.state.history.runtime == "native-1"
    drive.crashed(Cause.KILLED_UNKNOWN)
    drive.give(ev.Planned(2, replace(make_spec(2), runtime="native-2"))).crashed(Cause.UNKNOWN)
    (back,) = drive.of(ev.UseRuntime)
    (planned,) = drive.of(ev.Plan)
    assert back.runtime == "native-1"
    assert drive.effects.index(back) < drive.effects.index(planned)
    drive.give(ev.Planned(3, replace(make_spec(3), runtime="native-1")), ev.EngineReady(3, LIMITS), ev.Proved(3))
    assert (drive.state.state, drive.state.history.rung, drive.state.history.runtime) == (State.SERVING, 0, "native-1")
