"""Any event in any state: no exception, never two engines, never served without a proof, every move legal."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from appliance.core.causes import Cause
from appliance.core.states import ANSWERING, EngineState, check_move
from appliance.supervisor import events as ev
from appliance.supervisor.machine import MachineState, publication_of, step
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.machine_cases import LIMITS, TWO_CARDS, make_diagnosis, make_rung, make_spec, make_state

OFFSETS = st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1])
"""Mostly of the present life, sometimes of the last, sometimes of none yet."""

OTHERS = (make_rung(7, mem_fraction=0.8), make_rung(8, mem_fraction=0.7, tensor_parallel=2))
OFFERS = st.sampled_from([None, None, (), TWO_CARDS[2:4], OTHERS])
"""Rungs that were worked out for a failure, whatever numbers they have."""
JITTER = st.sampled_from([0.0, 0.5, 0.999])
RUNTIMES = st.sampled_from(["", "native-1", "native-2"])
QUIET = settings(max_examples=500, database=None, derandomize=True, deadline=None)


def build(kind: type, generation: int, data: st.DataObject) -> ev.Event:
    """An event of a kind for a life."""
    match kind:
        case ev.Planned:
            return ev.Planned(generation + 1, replace(make_spec(generation + 1), runtime=data.draw(RUNTIMES)))
        case ev.PlanFailed:
            return ev.PlanFailed(generation + 1, make_diagnosis(data.draw(st.sampled_from(Cause))), "inc", data.draw(RUNTIMES))
        case ev.EngineReady:
            return ev.EngineReady(generation, LIMITS)
        case ev.Progress:
            return ev.Progress(generation, *data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))))
        case ev.Diagnosed:
            verdict, cards_left = make_diagnosis(data.draw(st.sampled_from(Cause))), data.draw(st.sampled_from([None, 0, 1, 2]))
            return ev.Diagnosed(generation, verdict, "inc", data.draw(JITTER), cards_left, data.draw(OFFERS))
        case ev.TimerFired:
            return ev.TimerFired(generation, data.draw(st.sampled_from(ev.Timer)))
        case ev.HangDetected:
            return ev.HangDetected(generation, "x", stopped=data.draw(st.booleans()))
        case ev.StopRequested:
            return ev.StopRequested("x", immediately=data.draw(st.booleans()))
        case ev.SettingsChanged:
            numbers = MachineSettings(climb_after_s=data.draw(st.sampled_from([0.0, 60.0])))
            return ev.SettingsChanged(numbers, TWO_CARDS[: data.draw(st.integers(1, 5))], data.draw(st.booleans()))
        case ev.GpuReady:
            return ev.GpuReady(data.draw(st.sampled_from([1, 2])), ladder=data.draw(st.sampled_from([None, TWO_CARDS])))
        case ev.Started:
            return ev.Started()
        case ev.GroupEmpty | ev.Proved | ev.Loading:
            return kind(generation)
        case ev.WorstCaseBegun:
            return ev.WorstCaseBegun(generation, 8191)
        case ev.ProofRefused:
            verdict = data.draw(st.sampled_from([None, make_diagnosis(Cause.OK_DEGRADED)]))
            return ev.ProofRefused(generation, "x", verdict, data.draw(OFFERS))
        case ev.RestartRequested:
            return ev.RestartRequested("x", data.draw(st.sampled_from([None, 0, 3])))
        case ev.NoGpu | ev.GpuWaiting | ev.CardsGone | ev.GpuLost | ev.DrainRequested | ev.ResumeRequested:
            return kind("x")
    event: ev.Event = kind(generation, "x")
    return event


SENTENCES = {"generation", "text", "reason", "note", "incident_id"}
"""Fields that nothing is decided by, and the life, which the tests choose."""
ALIKE = {(ev.EngineReady, "limits"), (ev.WorstCaseBegun, "prompt_tokens")}
"""Told to clients and to the owner as they are."""
FIELDS = [
    (kind, field.name)
    for kind in ev.Event.__args__
    for field in dataclasses.fields(kind)
    if field.name not in SENTENCES and (kind, field.name) not in ALIKE
]


@st.composite
def events_of(draw: st.DrawFn, kind: type) -> ev.Event:
    """As the tests below get them."""
    return build(kind, 1, SimpleNamespace(draw=draw))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ev.Event.__args__, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_is_among_them(kind: type) -> None:
    """A new one is not forgotten here: it can be built, as what it is."""
    assert kind in KINDS + RARE
    assert type(find(events_of(kind), lambda _event: True, settings=QUIET)) is kind


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_whatever_is_decided_by_is_drawn(kind: type, field: str) -> None:
    """Each field of each event has at least two values in these tests."""
    first = find(events_of(kind), lambda _event: True, settings=QUIET)
    find(events_of(kind), lambda event: getattr(event, field) != getattr(first, field), settings=QUIET)


KINDS = [kind for kind in ev.Event.__args__ if kind is not ev.StopRequested]
RARE = [ev.StopRequested]


class Model:
    """What the outside world would see of the effects."""

    def __init__(self) -> None:
        self.living: set[int] = set()
        self.ready: set[int] = set()
        self.proved: set[int] = set()
        self.generations: list[int] = [0]
        self.served_by: set[str] = set()

    def see_event(self, before: MachineState, event: ev.Event) -> None:
        """Note what is true of the world once this event has been sent."""
        generation = getattr(event, "generation", 0)
        if isinstance(event, ev.GroupEmpty | ev.SpawnFailed):
            self.living.discard(generation)
        if isinstance(event, ev.EngineReady):
            self.ready.add(generation)
        # A refusal on the last rung is a proof that it works, on too little memory.
        if isinstance(event, ev.Proved | ev.ProofRefused) and before.state is EngineState.PROVING:
            self.proved.add(generation)
            assert before.spec is not None
            self.served_by.add(before.spec.runtime)

    def check(self, before: MachineState, after: MachineState, effects: tuple[ev.Effect, ...]) -> None:
        """The promises."""
        for effect in effects:
            if isinstance(effect, ev.Abandon):
                self.living.discard(effect.generation)  # stuck in the kernel on a card that nobody uses any more
            if isinstance(effect, ev.Spawn):
                assert not self.living, f"a second engine beside generation {self.living}"
                self.living.add(effect.generation)
            if isinstance(effect, ev.Plan) and after.uses_gpu:
                assert effect.rung.tensor_parallel <= after.cards, "planned for more cards than there are"
            if isinstance(effect, ev.UseRuntime):
                assert effect.runtime in self.served_by - {""}, "gone back to a runtime that never served"
            if isinstance(effect, ev.SaveHistory):
                assert effect.generation >= self.generations[-1], "the generation went back"
                self.generations.append(effect.generation)
        history, rungs = after.history, after.ladder
        assert [rung.index for rung in rungs] == list(range(len(rungs))), "an index is no place on the ladder"
        assert all(place is None or 0 <= place < len(rungs) for place in (history.rung, history.climbed_from, history.wants))
        assert history.climbed_from is None or history.climbed_from > history.rung, "on probation on the rung that it came from"
        assert not history.below or [rung.setting for rung in history.below] == [rung.setting for rung in rungs[1:]]
        if after.state in ANSWERING:
            assert after.generation in self.ready & self.proved, "served without a probe and a proof"
        if after.state is not before.state and (before.state, after.state) not in TWO_STEPS:
            check_move(before.state, after.state)
        if publication_of(after) != publication_of(before):
            assert any(isinstance(effect, ev.Publish) for effect in effects), "a change that nobody was told of"
        assert (publication_of(after).endpoint is None) or after.alive or after.failure is None


# Two legal moves in one step: `move()` itself has checked each.
TWO_STEPS = {
    (EngineState.DRAINING, EngineState.PLANNING),
    (EngineState.DRAINING, EngineState.WAITING_FOR_GPU),
    (EngineState.SERVING, EngineState.STOPPED),
}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_promises_hold_for_any_sequence_of_events(data: st.DataObject) -> None:
    """Random events, mostly of the present life, in random order: see the module."""
    state, model, now_s = make_state(settings=MachineSettings(climb_after_s=60.0), ladder=TWO_CARDS), Model(), 0.0
    state, effects = step(state, ev.Started(), now_s)
    stops = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(KINDS + RARE if stops else KINDS))
        event = build(kind, state.generation + data.draw(OFFSETS), data)
        now_s += data.draw(st.sampled_from([0.0, 0.01, 5.0]))
        model.see_event(state, event)
        after, effects = step(state, event, now_s)
        model.check(state, after, effects)
        state = after


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_machine_always_comes_to_rest(data: st.DataObject) -> None:
    """Whatever happened, a world that answers every effect brings the engine to SERVING, DEGRADED, PARKED or STOPPED."""
    state, now_s = make_state(ladder=TWO_CARDS), 0.0
    queue: list[ev.Event] = [ev.Started()]
    disturbances = data.draw(st.integers(0, 12))
    for _ in range(400):
        if not queue and disturbances:
            disturbances -= 1
            queue.append(build(data.draw(st.sampled_from(KINDS + RARE)), state.generation, data))
        if not queue:
            break
        now_s += 1.0
        state, effects = step(state, queue.pop(0), now_s)
        for effect in effects:
            queue.extend(answer_to(effect, data))
    assert state.state in ANSWERING | {EngineState.PARKED, EngineState.STOPPED}, state


def answer_to(effect: ev.Effect, data: st.DataObject) -> list[ev.Event]:
    """What the shell would send, on its good or bad days."""
    match effect:
        case ev.WaitForGpu():
            return [data.draw(st.sampled_from([ev.NoGpu("no card"), ev.GpuReady(1), ev.GpuReady(2), ev.CardsGone("lost")]))]
        case ev.Plan(generation=g, rung=rung):
            return [ev.Planned(g, make_spec(g, rung))]
        case ev.Spawn(generation=g):
            return [ev.EngineReady(g, LIMITS)] if data.draw(st.booleans()) else [ev.EngineExited(g, "exit 1")]
        case ev.Prove(generation=g):
            ends = [ev.Proved(g), ev.ProofFailed(g, "500"), ev.ProofRefused(g, "short", make_diagnosis(Cause.OK_DEGRADED))]
            return [*data.draw(st.sampled_from([[], [ev.WorstCaseBegun(g, 8191)]])), data.draw(st.sampled_from(ends))]
        case ev.Kill(generation=g, how=ev.KillHow.TERM):
            return [ev.EngineExited(g, "exit 0")]
        case ev.Kill(generation=g):
            return [ev.EngineExited(g, "killed"), ev.GroupEmpty(g)]
        case ev.Diagnose(generation=g, known=known) if known is not None:
            return [ev.Diagnosed(g, known, f"inc-{g}", 0.5)]
        case ev.Diagnose(generation=g):
            cause, cards_left = data.draw(st.sampled_from(Cause)), data.draw(st.sampled_from([None, 0, 1]))
            return [ev.Diagnosed(g, make_diagnosis(cause), f"inc-{g}", 0.5, cards_left, data.draw(OFFERS))]
        case ev.Abandon():
            return []
        case ev.SetTimer(timer=timer, generation=g) if timer not in (ev.Timer.STABLE, ev.Timer.CLIMB):
            return [ev.TimerFired(g, timer)]
    return []
