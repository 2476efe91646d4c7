"""The table and its rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.core.action import Action, ActionKind
from appliance.core.causes import Cause
from appliance.core.plan import Rung
from appliance.diagnosis import action_for
from appliance.supervisor.history import History, Phase
from appliance.supervisor.policy import TABLE, WAITED_STARTS, Response, backoff_s, decide
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LADDER, make_diagnosis, make_failure, make_rung

SETTINGS = MachineSettings()
RESTARTS = {ActionKind.RESTART_SAME, ActionKind.RESTART_SAFER, ActionKind.WAIT, ActionKind.USE_REMAINING_GPU}


def fail(
    history: History, cause: Cause, phase: Phase = Phase.SERVING, ladder: tuple[Rung, ...] = LADDER, cards_left: int = 0
) -> tuple[ActionKind, History, str]:
    """One failure and what is done: the kind, the history after it, and the basis."""
    counted = history.with_failure(cause, phase, ladder[history.rung])
    action = decide(make_diagnosis(cause), counted, ladder, SETTINGS, make_failure(phase), cards_left=cards_left)
    rung = action.rung.index if action.rung is not None else counted.rung
    after = History(rung, counted.start_failures, counted.failures, counted.tried)
    return action.kind, after.proved() if phase is Phase.SERVING else after, action.basis


def run(cause: Cause, times: int, phase: Phase = Phase.SERVING) -> list[tuple[ActionKind, int]]:
    """The same failure again and again: kind and the rung afterwards, until parked."""
    history, done = History(), []
    for _ in range(times):
        kind, history, _ = fail(history, cause, phase)
        done.append((kind, history.rung))
        if kind is ActionKind.PARK:
            break
    return done


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_every_cause_has_an_action(cause: Cause, phase: Phase) -> None:
    """No cause is forgotten: an action of the closed vocabulary, a rung where one is needed, and a whole sentence."""
    assert cause in TABLE
    action = decide(make_diagnosis(cause), History().with_failure(cause, phase, LADDER[0]), LADDER, SETTINGS, make_failure(phase))
    assert action.kind in RESTARTS | {ActionKind.PARK}
    assert (action.rung is not None) == (action.kind in RESTARTS)
    assert " because " in action.basis
    assert "(evidence exit: 'killed by SIGKILL')" in action.basis


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
def test_no_rung_is_tried_a_third_time_for_the_same_cause(cause: Cause) -> None:
    """Where a rung can be to blame it gets two tries a cause, and the story ends PARKED instead of going round."""
    if TABLE[cause].response in (Response.OUTSIDE, Response.WAIT, Response.WAIT_FOR_GPU):
        return
    rungs = [0, *(rung for kind, rung in run(cause, 50) if kind is not ActionKind.PARK)]
    assert max(len(list(group)) for _, group in itertools.groupby(rungs)) <= 2
    assert rungs == sorted(rungs)
    assert run(cause, 50)[-1][0] is ActionKind.PARK


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
def test_failed_starts_never_loop(cause: Cause) -> None:
    """Whatever the cause: start_failures_max failed starts in a row at the most, then PARKED; what may pass by itself has some more."""
    story = run(cause, 50, Phase.START)
    assert story[-1][0] is ActionKind.PARK
    passes = TABLE[cause].response in (Response.WAIT, Response.WAIT_FOR_GPU)
    assert len(story) == WAITED_STARTS if passes else len(story) <= SETTINGS.start_failures_max


def test_what_passes_by_itself_is_waited_for_as_long_as_clients_are() -> None:
    """Somebody's port, memory or hub: minutes, not the two seconds that three starts take; an owner who allows more starts has them."""
    patient, failure = MachineSettings(start_failures_max=50), make_failure(Phase.START)
    waits, history = [], History()
    for count in range(1, 50):
        history = history.with_failure(Cause.VRAM_HELD_BY_OTHER, Phase.START, LADDER[0])
        action = decide(make_diagnosis(Cause.VRAM_HELD_BY_OTHER), history, LADDER, SETTINGS, failure)
        waits += [action.delay_s] if count < WAITED_STARTS else []
        assert (action.kind is ActionKind.PARK) is (count >= WAITED_STARTS)
        assert decide(make_diagnosis(Cause.VRAM_HELD_BY_OTHER), history, LADDER, patient, failure).kind is ActionKind.WAIT
    assert 180 < sum(waits) < 300


def test_chance_is_tried_once_more_then_safer() -> None:
    """A segfault: the same rung, then one rung down, twice each."""
    assert run(Cause.SEGFAULT_NATIVE, 4) == [
        (ActionKind.RESTART_SAME, 0),
        (ActionKind.RESTART_SAFER, 1),
        (ActionKind.RESTART_SAME, 1),
        (ActionKind.RESTART_SAFER, 2),
    ]


def test_a_killer_outside_is_never_blamed_on_the_rung() -> None:
    """Twenty times kill -9 by somebody: twenty restarts on the rung the owner configured."""
    assert run(Cause.KILLED_UNKNOWN, 20) == [(ActionKind.RESTART_SAME, 0)] * 20


def test_what_was_done_from_outside_is_not_blamed_on_the_rung() -> None:
    """SIGSTOP by somebody looks like a hang; the rung stays, however often."""
    history = History()
    for _ in range(5):
        history = history.with_failure(Cause.ENGINE_WATCHDOG, Phase.SERVING, LADDER[0], outside=True)
        action = decide(make_diagnosis(Cause.ENGINE_WATCHDOG), history, LADDER, SETTINGS, make_failure(outside=True))
        assert action.kind is ActionKind.RESTART_SAME


def test_an_endpoint_that_is_up_between_crashes_is_not_parked() -> None:
    """A segfault every hour: down the ladder as always, and on its last rung on and on; out of memory there is still PARKED."""
    history, rungs = History(), []
    for _ in range(20):
        history = history.with_failure(Cause.SEGFAULT_NATIVE, Phase.SERVING, LADDER[history.rung])
        action = decide(make_diagnosis(Cause.SEGFAULT_NATIVE), history, LADDER, SETTINGS, make_failure(uptime_s=3000.0))
        assert action.rung is not None
        history = replace(history, rung=action.rung.index)
        rungs.append(action.rung.index)
    assert rungs[:7] == [0, 1, 1, 2, 2, 3, 3]
    assert set(rungs[7:]) == {3}
    history = history.with_failure(Cause.CUDA_OOM_PREFILL, Phase.SERVING, LADDER[history.rung])
    oom = decide(make_diagnosis(Cause.CUDA_OOM_PREFILL), history, LADDER, SETTINGS, make_failure(uptime_s=3000.0))
    assert oom.kind is ActionKind.PARK


def test_each_memory_cause_moves_its_own_dimension() -> None:
    """Prefill OOM wants a smaller chunk, no free slots want fewer sequences, too small a pool wants a shorter context."""
    moves = {Cause.CUDA_OOM_PREFILL: 1, Cause.KV_POOL_EXHAUSTED: 2, Cause.KV_POOL_TOO_SMALL: 3}
    for cause, rung in moves.items():
        assert run(cause, 1) == [(ActionKind.RESTART_SAFER, rung)]


def test_opposite_causes_end_parked() -> None:
    """OOM at run time and "not enough memory" at start by turns: never back up, and an end."""
    history, kinds = History(), []
    for cause, phase in itertools.islice(
        itertools.cycle([(Cause.CUDA_OOM_PREFILL, Phase.SERVING), (Cause.KV_POOL_TOO_SMALL, Phase.START)]), 20
    ):
        before = history.rung
        kind, history, _ = fail(history, cause, phase)
        kinds.append(kind)
        assert history.rung >= before
        if kind is ActionKind.PARK:
            break
    assert kinds[-1] is ActionKind.PARK


def test_a_lost_card_uses_the_remaining_one() -> None:
    """Two cards, one falls off the bus: the first rung that needs fewer cards, at once, or the same where it fits; with none: PARKED."""
    two = (make_rung(0, tensor_parallel=2), make_rung(1, tensor_parallel=2), make_rung(2, tensor_parallel=1))
    kind, history, basis = fail(History(), Cause.GPU_OFF_BUS, ladder=two, cards_left=1)
    assert (kind, history.rung) == (ActionKind.USE_REMAINING_GPU, 2)
    assert "the card that is left (rung 2)" in basis
    assert fail(History(), Cause.GPU_OFF_BUS, ladder=two[:2], cards_left=1)[0] is ActionKind.PARK
    assert fail(History(), Cause.GPU_OFF_BUS, cards_left=1)[:2] == (
        ActionKind.USE_REMAINING_GPU,
        History().with_failure(Cause.GPU_OFF_BUS, Phase.SERVING, LADDER[0]).proved(),
    )
    assert fail(History(), Cause.GPU_OFF_BUS)[0] is ActionKind.PARK


def test_parking_tells_the_owner_what_to_do() -> None:
    """The first remedy is part of the sentence, and so is the verb that leaves PARKED."""
    diagnosis = make_diagnosis(Cause.GPU_OFF_BUS, remedies=("power cycle the machine.",))
    action = decide(
        diagnosis, History().with_failure(Cause.GPU_OFF_BUS, Phase.SERVING, LADDER[0]), LADDER, SETTINGS, make_failure(Phase.SERVING)
    )
    assert action.basis.endswith("to do: power cycle the machine, then appliancectl resume")


def test_back_off_doubles_to_its_limit() -> None:
    """Immediate, first, twice, four times ... longest; jitter only ever lengthens, and never past the longest."""
    assert [backoff_s(n, SETTINGS, 0.0) for n in range(9)] == [0, 0, 1, 2, 4, 8, 16, 32, 60]
    assert backoff_s(10**6, SETTINGS, 1.0) == 60
    assert backoff_s(3, SETTINGS, 1.0) == 2.5


def test_waiting_for_something_outside_waits_at_least_a_little() -> None:
    """A port in use: even the first try waits, for it cannot have changed yet."""
    history = History().with_failure(Cause.PORT_IN_USE, Phase.START, LADDER[0])
    action = decide(make_diagnosis(Cause.PORT_IN_USE), history, LADDER, SETTINGS, make_failure(Phase.START))
    assert (action.kind, action.delay_s) == (ActionKind.WAIT, 1.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Cause), st.sampled_from(Phase)), max_size=40))
def test_rungs_only_fall(story: list[tuple[Cause, Phase]]) -> None:
    """Any story of causes: the rung never goes back up, so there is no circle to go round in."""
    history = History()
    for cause, phase in story:
        kind, after, _ = fail(history, cause, phase)
        assert after.rung >= history.rung
        if kind is ActionKind.PARK:
            break
        history = after


@pytest.mark.parametrize("cause", [cause for cause in Cause if not cause.is_ok], ids=lambda cause: cause.label)
def test_diagnose_announces_what_is_done(cause: Cause) -> None:
    """`appliancectl diagnose` on any log says what the appliance would do the first time: what it does, on a ladder that has it all."""
    ladder = (*LADDER, make_rung(4, tensor_parallel=1, features_off=frozenset({"cuda_graph"})))
    ladder = tuple(replace(rung, tensor_parallel=2) if rung.index < 4 else rung for rung in ladder)
    action = decide(
        make_diagnosis(cause), History().with_failure(cause, Phase.SERVING, ladder[0]), ladder, SETTINGS, make_failure(), cards_left=1
    )
    assert action.kind is action_for(cause)


def test_what_only_some_rungs_cure_is_not_tried_on_others() -> None:
    """Traffic between the cards resets the machine, and would again on a rung that leaves it on: parked where each one does."""
    history = History().with_failure(Cause.P2P_UNSAFE, Phase.SERVING, LADDER[0])
    assert decide(make_diagnosis(Cause.P2P_UNSAFE), history, LADDER, SETTINGS, make_failure()).kind is ActionKind.PARK
    ladder = (*LADDER, make_rung(4, features_off=frozenset({"custom_all_reduce"})))
    action = decide(make_diagnosis(Cause.P2P_UNSAFE), history, ladder, SETTINGS, make_failure())
    assert (action.kind, action.rung) == (ActionKind.RESTART_SAFER, ladder[4])


def _start_of(runtime: str, cause: Cause, failures: int = 0, **changes: object) -> Action:
    history = replace(History(start_failures=failures, runtime="native-1"), rung=1).with_failure(cause, Phase.START, LADDER[1])
    failure = make_failure(**{"phase": Phase.START, "runtime": runtime, **changes})
    return decide(make_diagnosis(cause), history, LADDER, SETTINGS, failure)


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.SEGFAULT_NATIVE, Cause.ENGINE_CONFIG, Cause.CUDA_OOM_STARTUP, Cause.START_TIMEOUT])
def test_a_runtime_that_has_never_served_is_left_for_the_one_that_has(cause: Cause) -> None:
    """At once and on the same rung: the setting had served."""
    action = _start_of("native-2", cause)
    assert (action.kind, action.runtime, action.rung) == (ActionKind.ROLL_BACK, "native-1", LADDER[1])
    assert action.basis.startswith("went back to the runtime native-1 from native-2, which has never served, because ")


@pytest.mark.parametrize(
    ("runtime", "cause", "changes"),
    [
        ("native-1", Cause.UNKNOWN, {}),
        ("", Cause.UNKNOWN, {}),
        ("native-2", Cause.MODEL_MISSING, {}),
        ("native-2", Cause.PORT_IN_USE, {}),
        ("native-2", Cause.GPU_OFF_BUS, {}),
        ("native-2", Cause.KILLED_UNKNOWN, {}),
        ("native-2", Cause.UNKNOWN, {"phase": Phase.SERVING}),
        ("native-2", Cause.UNKNOWN, {"outside": True}),
        ("native-2", Cause.UNKNOWN, {"refused": True}),
        ("native-2", Cause.UNKNOWN, {"failures": SETTINGS.start_failures_max - 1}),
    ],
)
def test_a_runtime_is_kept_where_it_is_not_to_blame(runtime: str, cause: Cause, changes: dict[str, object]) -> None:
    """It had served, the machine or the model did it, or the starts are used up: then a person is needed."""
    assert _start_of(runtime, cause, **changes).kind is not ActionKind.ROLL_BACK


@pytest.mark.parametrize("cause", [Cause.CUDA_OOM_PREFILL, Cause.MODEL_MISSING, Cause.SEGFAULT_NATIVE])
def test_what_was_done_from_outside_is_met_as_such_whatever_it_is_called(cause: Cause) -> None:
    """No safer rung and no person is needed for what somebody did to the engine."""
    history = History().with_failure(cause, Phase.SERVING, LADDER[0], outside=True)
    action = decide(make_diagnosis(cause), history, LADDER, SETTINGS, make_failure(outside=True))
    assert (action.kind, action.rung) == (ActionKind.RESTART_SAME, LADDER[0])


def test_the_budget_of_starts_is_spent_by_starts_alone() -> None:
    """An engine that served and was killed is restarted, however many starts had failed before it."""
    history = replace(History(), start_failures=9).with_failure(Cause.KILLED_UNKNOWN, Phase.SERVING, LADDER[0])
    action = decide(make_diagnosis(Cause.KILLED_UNKNOWN), history, LADDER, SETTINGS, make_failure(Phase.SERVING))
    assert action.kind is ActionKind.RESTART_SAME


@pytest.mark.parametrize(("uptime_s", "kind"), [(299.0, ActionKind.PARK), (300.0, ActionKind.RESTART_SAME)])
def test_five_minutes_are_a_fair_trial(uptime_s: float, kind: ActionKind) -> None:
    """On the last rung, the third time: served for so long it is restarted, for less it is parked."""
    history = replace(History(), rung=3)
    for _ in range(3):
        history = history.with_failure(Cause.SEGFAULT_NATIVE, Phase.SERVING, LADDER[3])
    action = decide(make_diagnosis(Cause.SEGFAULT_NATIVE), history, LADDER, SETTINGS, make_failure(uptime_s=uptime_s))
    assert action.kind is kind


def test_a_climb_that_its_proof_refuses_is_told_as_one() -> None:
    """Not as a step down to something safer: it goes back to where it came from."""
    history = replace(History(), rung=1, climbed_from=2).with_failure(Cause.OK_DEGRADED, Phase.START, LADDER[1], refused=True)
    action = decide(make_diagnosis(Cause.OK_DEGRADED), history, LADDER, SETTINGS, make_failure(Phase.START, refused=True))
    assert (action.rung, action.delay_s) == (LADDER[2], 0.0)
    assert action.basis.startswith("fell back to rung 2, from which it had climbed")


@pytest.mark.parametrize(("times", "rung"), [(1, 1), (2, 2)])
def test_a_rung_that_failed_twice_of_this_is_passed_over(times: int, rung: int) -> None:
    """Somebody went back to rung 0 by hand: the one below it is not tried a third time for the same cause, a second time it is."""
    history = History()
    for failed in (LADDER[0], LADDER[0], *(LADDER[1],) * times):
        history = history.with_failure(Cause.SEGFAULT_NATIVE, Phase.SERVING, failed)
    action = decide(make_diagnosis(Cause.SEGFAULT_NATIVE), history, LADDER, SETTINGS, make_failure())
    assert (action.kind, action.rung) == (ActionKind.RESTART_SAFER, LADDER[rung])


def test_a_rung_that_fits_the_cards_that_are_left_stays_where_it_is() -> None:
    """Also where others were worked out for it: nothing is given up."""
    history = History().with_failure(Cause.GPU_OFF_BUS, Phase.SERVING, LADDER[0])
    action = decide(make_diagnosis(Cause.GPU_OFF_BUS), history, LADDER, SETTINGS, make_failure(), cards_left=1, offers=LADDER[1:])
    assert (action.kind, action.rung) == (ActionKind.USE_REMAINING_GPU, LADDER[0])


def test_a_refused_proof_on_the_last_rung_is_not_the_runtimes_fault() -> None:
    """It works in this environment; it only leaves little memory."""
    history = replace(History(runtime="native-1"), rung=3).with_failure(Cause.UNKNOWN, Phase.START, LADDER[3], refused=True)
    failure = make_failure(Phase.START, runtime="native-2", refused=True)
    assert decide(make_diagnosis(Cause.UNKNOWN), history, LADDER, SETTINGS, failure).kind is ActionKind.RESTART_SAME
