"""The reducer's part about proof runs: a rung that promises more than its memory holds is left before clients come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from appliance.supervisor.history import History, Phase
from appliance.supervisor.machine import publication_of
from tests.unit.planner import shapes
from tests.unit.supervisor.machine_cases import LADDER, LIMITS, Drive, make_diagnosis, make_rung, make_spec, make_state

VERDICT = make_diagnosis(Cause.OK_DEGRADED, sentence="The proof run found too little memory.")


def proving(drive: Drive | None = None) -> Drive:
    """An engine that has answered its canary, with the longest prompt under way."""
    drive = drive or Drive().give(ev.Started(), ev.NoGpu("no card"))
    g = drive.state.generation + 1
    return drive.give(ev.Planned(g, make_spec(g, drive.state.rung)), ev.EngineReady(g, LIMITS), ev.WorstCaseBegun(g, 8191))


def refused(drive: Drive) -> Drive:
    """Its proof is refused, it is cleared away, and the verdict is in."""
    g = drive.state.generation
    drive.give(ev.ProofRefused(g, "its proof was refused: 1 MiB stayed free", VERDICT))
    assert [kill.how for kill in drive.of(ev.Kill)] == [ev.KillHow.NOW]
    drive.give(ev.EngineExited(g, "killed by SIGKILL"), ev.GroupEmpty(g))
    assert drive.of(ev.Diagnose) == [ev.Diagnose(g, VERDICT)]
    return drive.give(ev.Diagnosed(g, VERDICT, f"inc-{g}", 0.5))


def test_the_longest_prompt_has_its_own_deadline_and_is_told_of() -> None:
    """A long honest prefill is not a failed start; people see what the wait is for."""
    drive = proving()
    assert drive.state.state is State.PROVING
    assert drive.of(ev.SetTimer) == [ev.SetTimer(ev.Timer.START, 1, 60.0)]
    assert "8,191 tokens" in drive.of(ev.Publish)[0].publication.reason
    assert publication_of(drive.state).endpoint is None
    assert drive.give(ev.Proved(1)).state.state is State.SERVING


def test_a_refused_rung_is_left_for_the_next_at_once() -> None:
    """One incident, no wait, no failed start counted, DEGRADED on the next rung."""
    drive = refused(proving())
    assert drive.of(ev.Plan) == [ev.Plan(2, LADDER[1])]
    record = drive.of(ev.RecordIncident)[0]
    assert (record.action.kind, record.action.delay_s, record.failure.phase) == (ActionKind.RESTART_SAFER, 0.0, Phase.START)
    assert "because the proof run found too little memory" in record.action.basis
    assert drive.state.history.start_failures == 0
    assert proving(drive).give(ev.Proved(2)).state.state is State.DEGRADED


def test_the_whole_ladder_may_be_refused_and_the_last_rung_serves() -> None:
    """Never parked for a thin margin: short of memory is better than gone, and the sentence says so."""
    drive = proving()
    for _ in LADDER[1:]:
        drive = proving(refused(drive))
    drive.give(ev.ProofRefused(drive.state.generation, "its proof was refused: 1 MiB stayed free", VERDICT))
    assert drive.state.state is State.DEGRADED
    assert drive.state.rung == LADDER[-1]
    assert "1 MiB stayed free" in drive.state.sentence
    assert drive.of(ev.Kill) == []


def test_rungs_that_do_not_fit_what_was_measured_are_passed_over() -> None:
    """The next life is on the first rung whose plan holds the measured peak."""
    asked = shapes.inputs(shapes.facts(shapes.dense()), "rtx3090", "sglang", context_length_tokens=8192)
    good = shapes.plan_of(asked, 0.9)
    bad = replace(good, headroom_bytes=0)
    ladder = tuple(make_rung(index, plan=bad if index < 2 else good) for index in range(4))
    drive = refused(proving(Drive(make_state(ladder=ladder)).give(ev.Started(), ev.NoGpu("no card"))))
    assert drive.of(ev.Plan) == [ev.Plan(2, ladder[2])]


def test_a_refused_climb_goes_back_to_where_it_came_from() -> None:
    """On probation, the proof decides too."""
    state = make_state(history=History(rung=1, climbed_from=2))
    drive = refused(proving(Drive(state).give(ev.Started(), ev.NoGpu("no card"))))
    assert drive.state.history.rung == 2
    assert drive.state.history.failed_climbs == 1


def test_a_serving_engine_that_is_refused_in_idle_time_is_replaced() -> None:
    """ladder.prove = idle: the same way, from SERVING."""
    drive = Drive().serving().give(ev.ProofRefused(1, "its proof was refused", VERDICT))
    assert drive.state.state is State.BACKOFF
    assert refused_after(drive).state.history.rung == 1


def refused_after(drive: Drive) -> Drive:
    """The rest of a refusal that was given already."""
    g = drive.state.generation
    return drive.give(ev.EngineExited(g, "killed"), ev.GroupEmpty(g), ev.Diagnosed(g, VERDICT, "inc", 0.5))


def test_a_refusal_of_an_engine_that_is_being_stopped_changes_nothing() -> None:
    """The stop was there first."""
    drive = proving().give(ev.StopRequested("SIGTERM"))
    assert drive.state.state is State.DRAINING
    assert drive.give(ev.ProofRefused(1, "late", VERDICT)).effects == ()
    assert drive.give(ev.WorstCaseBegun(1, 8191)).effects == ()
    assert drive.give(ev.Proved(1)).state.state is State.DRAINING


@pytest.mark.parametrize(("cause", "rung"), [(Cause.HOST_OOM, 1), (Cause.SEGFAULT_NATIVE, 0), (Cause.KILLED_UNKNOWN, 0)])
def test_out_of_memory_during_the_proof_is_no_chance(cause: Cause, rung: int) -> None:
    """Else it may have been another program's fault: the same rung once more. A signal from outside is never held against a rung."""
    assert proving().crashed(cause).state.history.rung == rung


def test_the_proof_is_over_with_the_life() -> None:
    """A crash while serving is judged as ever."""
    drive = proving().give(ev.Proved(1)).crashed(Cause.HOST_OOM)
    assert drive.state.history.rung == 0


def test_a_rung_of_which_nothing_is_planned_is_not_passed_over() -> None:
    """That its memory is not known is nothing against it."""
    asked = shapes.inputs(shapes.facts(shapes.dense()), "rtx3090", "sglang", context_length_tokens=8192)
    ladder = tuple(make_rung(index, plan=shapes.plan_of(asked, 0.9) if index == 2 else None) for index in range(4))
    drive = refused(proving(Drive(make_state(ladder=ladder)).give(ev.Started(), ev.NoGpu("no card"))))
    assert drive.of(ev.Plan) == [ev.Plan(2, ladder[1])]
