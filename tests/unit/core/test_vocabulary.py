"""The tables of appliance/core hold together."""

import itertools
import re

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.errors import ApplianceError, ExitCode, NotPermitted, Unreachable
from appliance.core.launch import Endpoint
from appliance.core.plan import MemoryPlan
from appliance.core.states import ALLOWED_MOVES, ANSWERING, COMING_BACK, EngineState, IllegalMove, check_move


def _reachable(start: EngineState) -> set[EngineState]:
    seen, todo = {start}, [start]
    while todo:
        for after in ALLOWED_MOVES[todo.pop()] - seen:
            seen.add(after)
            todo.append(after)
    return seen


def test_every_state_has_its_moves() -> None:
    """A state that was added and forgotten in the table would end in a KeyError at three in the morning."""
    assert set(ALLOWED_MOVES) == set(EngineState)
    assert all(after in EngineState for moves in ALLOWED_MOVES.values() for after in moves)


def test_every_state_is_reached_from_the_first() -> None:
    """No dead entry in the table."""
    assert _reachable(EngineState.WAITING_FOR_GPU) == set(EngineState)


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.STOPPED])
def test_every_state_can_be_stopped_and_can_serve_again(state: EngineState) -> None:
    """No trap but STOPPED; and a clean stop of an answering engine goes through DRAINING."""
    assert EngineState.STOPPED in _reachable(state)
    if state is not EngineState.DRAINING:
        assert EngineState.SERVING in _reachable(state)
    if state in ANSWERING:
        assert EngineState.STOPPED not in ALLOWED_MOVES[state]


def test_serving_is_entered_from_a_proof_only() -> None:
    """No path publishes an engine whose canary did not answer (a change of rung in place needs none)."""
    into = {before for before, moves in ALLOWED_MOVES.items() if EngineState.SERVING in moves}
    assert into == {EngineState.PROVING, EngineState.DEGRADED}


def test_states_with_and_without_an_engine_do_not_overlap() -> None:
    """The gateway sends in one set and holds in the other."""
    assert not ANSWERING & COMING_BACK


def test_check_move_is_the_table() -> None:
    """All pairs: legal or staying passes, the rest raises with both names."""
    for before, after in itertools.product(EngineState, EngineState):
        if after is before or after in ALLOWED_MOVES[before]:
            check_move(before, after)
        else:
            with pytest.raises(IllegalMove, match=f"{before.value} -> {after.value}"):
                check_move(before, after)


def test_cause_labels_are_unique_words_and_read_back() -> None:
    """Labels are part of --json and of the incidents on disk."""
    labels = [cause.label for cause in Cause]
    assert len(set(labels)) == len(labels)
    for cause in Cause:
        assert re.fullmatch(r"[a-z0-9_]+", cause.label)
        assert Cause.of(cause.label) is cause
        assert cause.definition
        assert cause.is_ok == (cause.group == "no crash")
    with pytest.raises(KeyError):
        Cause.of("nothing_like_it")


def test_unknown_counts_as_a_crash() -> None:
    """`diagnose` exits 1 on unknown: silence about a crash would be a guess."""
    assert Diagnosis(Cause.UNKNOWN, Confidence.LOW, "no evidence", None).crashed
    assert not Diagnosis(Cause.OK_SHUTDOWN, Confidence.HIGH, "stopped", None).crashed


@pytest.mark.parametrize("text", ["unix:/run/llm-appliance/engine-3.sock", "http://127.0.0.1:30000"])
def test_endpoints_read_back(text: str) -> None:
    """They cross the control socket as text."""
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize("text", ["", "unix:relative.sock", "http://10.0.0.1:80", "http://127.0.0.1:", "http://127.0.0.1:x"])
def test_other_endpoints_are_refused(text: str) -> None:
    """An engine is local by construction."""
    with pytest.raises(ValueError, match="no endpoint"):
        Endpoint.parse(text)


@pytest.mark.parametrize("wrong", [{}, {"socket_path": "/s", "port": 1}])
def test_an_endpoint_is_exactly_one_thing(wrong: dict) -> None:
    """Neither none nor both."""
    with pytest.raises(ValueError, match="either"):
        Endpoint(**wrong)


def test_errors_carry_their_exit_code_and_hint() -> None:
    """appliancectl needs no table of its own."""
    assert ApplianceError("broken").exit_code is ExitCode.BAD
    assert Unreachable("gone").exit_code is ExitCode.UNREACHABLE
    assert NotPermitted("no").exit_code is ExitCode.NOT_PERMITTED
    assert str(ApplianceError("broken", hint="mend it")) == "broken; mend it"


@pytest.mark.parametrize(
    ("kv_tokens", "context_tokens", "headroom", "fits"),
    [(4096, 4096, 100, True), (4095, 4096, 100, False), (4096, 4096, 99, False), (4096, 0, 100, False)],
)
def test_a_plan_fits_when_one_whole_sequence_and_the_peak_do(kv_tokens: int, context_tokens: int, headroom: int, fits: bool) -> None:
    """Both limits are inclusive; a plan without a context fits nothing."""
    plan = MemoryPlan(
        free_at_start_bytes=1000,
        mem_fraction=0.9,
        weight_bytes=1,
        linear_state_bytes=0,
        kv_pool_bytes=1,
        kv_bytes_per_token=1,
        kv_tokens=kv_tokens,
        headroom_bytes=headroom,
        activation_peak_bytes=100,
        context_length_tokens=context_tokens,
    )
    assert plan.fits is fits
