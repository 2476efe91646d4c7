"""Several engines as one publication and one status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.control.codec import publication_from_json, publication_to_json
from appliance.core.launch import Endpoint, EngineLimits
from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, COMING_BACK, EngineState
from appliance.supervisor.summing import NEAREST, shown, summed, summed_status

CARDS = ("0000:01:00", "0000:02:00", "0000:03:00", "0000:04:00")
LIMITS = EngineLimits("demo", 4096, 8, 16384)


def publication(state: EngineState, generation: int = 1, place: int = 0, *, running: bool = True) -> Publication:
    """As one supervisor publishes it. `running`: a DRAINING one can still be reached."""
    reachable = state in ANSWERING or (state is EngineState.DRAINING and running)
    endpoint = Endpoint(socket_path=f"/run/{place}/engine-{generation}.sock") if reachable else None
    wait_s = 5.0 + place if state in COMING_BACK else None
    incident = f"inc-{generation:04}" if state in (EngineState.BACKOFF, EngineState.PARKED) else None
    return Publication(state, generation, endpoint, LIMITS if reachable else None, f"{state.value} ({place})", wait_s, incident)


@st.composite
def several(draw: st.DrawFn) -> tuple[Publication, ...]:
    """Any of them together."""
    count = draw(st.integers(2, 4))
    return tuple(
        publication(draw(st.sampled_from(EngineState)), draw(st.integers(0, 99)), place, running=draw(st.booleans()))
        for place in range(count)
    )


@given(several(), st.integers(0, 1000))
def test_any_combination_is_a_legal_publication(each: tuple[Publication, ...], before: int) -> None:
    """Its state follows from theirs, and what can be reached is one of them that is in that state; it survives the socket."""
    outer = summed(each, CARDS[: len(each)], before)
    states = [one.state for one in each]
    assert (outer.state in ANSWERING) == any(state in ANSWERING for state in states)
    assert (outer.state is EngineState.SERVING) == all(state is EngineState.SERVING for state in states)
    assert outer.state in states or outer.state is EngineState.DEGRADED
    assert (outer.state is EngineState.STOPPED) == all(state is EngineState.STOPPED for state in states)
    assert outer.replicas == each
    assert outer.generation == before + sum(one.generation for one in each)
    assert (outer.endpoint is not None) == (outer.limits is not None)
    if outer.endpoint is not None:
        assert outer.state in ANSWERING or outer.state is EngineState.DRAINING
        assert any((one.endpoint, one.limits) == (outer.endpoint, outer.limits) for one in each)
    assert outer.endpoint is not None or outer.state not in ANSWERING
    assert outer.retry_after_s is None or outer.state not in ANSWERING
    assert outer.reason
    assert "\n" not in outer.reason
    assert publication_from_json(publication_to_json(outer)) == outer


@given(several(), st.data())
def test_every_new_life_of_any_engine_is_a_higher_generation(each: tuple[Publication, ...], data: st.DataObject) -> None:
    """Whoever holds requests until a higher one may look at the sum alone."""
    at = data.draw(st.integers(0, len(each) - 1))
    later = tuple(replace(one, generation=one.generation + 1) if index == at else one for index, one in enumerate(each))
    cards = CARDS[: len(each)]
    assert summed(later, cards).generation > summed(each, cards).generation


@given(several())
def test_whoever_does_not_serve_is_named_with_its_own_sentence(each: tuple[Publication, ...]) -> None:
    """By the card's address, so that the owner knows which slot to look at."""
    cards = CARDS[: len(each)]
    outer = summed(each, cards)
    for card, one in zip(cards, each, strict=True):
        assert (f"card {card}: {one.reason}" in outer.reason) == (one.state is not EngineState.SERVING)


def test_every_state_has_its_place() -> None:
    """In the order of nearness."""
    assert sorted(NEAREST, key=lambda state: state.value) == sorted(EngineState, key=lambda state: state.value)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (("serving", "serving"), "2 engines serve, each on a card of its own"),
        (("serving", "backoff"), "1 of 2 engines serves; card 0000:02:00: backoff (1)"),
        (("serving", "degraded"), "2 engines serve, each on a card of its own; card 0000:02:00: degraded (1)"),
        (("parked", "starting"), "none of 2 engines serve; card 0000:01:00: parked (0); card 0000:02:00: starting (1)"),
    ],
)
def test_the_sentence(states: tuple[str, ...], words: str) -> None:
    """What `systemctl status` shows."""
    each = [publication(EngineState(state), 1, place) for place, state in enumerate(states)]
    assert summed(each, CARDS[:2]).reason == words


def test_one_sentence_for_all_of_them_is_said_once() -> None:
    """A stop, or a driver that all of them wait for."""
    each = [replace(publication(EngineState.DRAINING, 1, place), reason="stopping: SIGTERM to applianced") for place in range(2)]
    assert summed(each, CARDS[:2]).reason == "stopping: SIGTERM to applianced"


def test_one_that_can_be_reached_stands_for_all() -> None:
    """Of two that drain, the one whose answers still run."""
    each = [publication(EngineState.DRAINING, 1, 0, running=False), publication(EngineState.DRAINING, 1, 1)]
    assert shown(each) == 1
    assert summed(each, CARDS[:2]).endpoint == each[1].endpoint


def status(restarts: int, xids: dict[str, int], incident: dict[str, Any] | None, **sensors: tuple[bool, str]) -> dict[str, Any]:
    """As one engine's verbs answer."""
    readings = {name: {"ok": ok, "detail": detail} for name, (ok, detail) in sensors.items()}
    return {"restarts": restarts, "xids": xids, "last_incident": incident, "sensors": readings, "rung": {"index": restarts}}


def test_a_status_adds_what_can_be_added() -> None:
    """Restarts and Xids are sums, the newest incident is the last, a sensor that all share is said once; each is there in full."""
    outer = summed([publication(EngineState.BACKOFF, 3, 0), publication(EngineState.SERVING, 4, 1)], CARDS[:2])
    first = status(1, {"79": 1}, {"time_s": 20.0, "incident_id": "b"}, nvml=(True, "works"), gpu=(False, "lost"))
    second = status(2, {"79": 1, "31": 2}, {"time_s": 10.0, "incident_id": "a"}, nvml=(True, "works"), gpu=(True, "1 card"))
    told = summed_status([first, second], CARDS[:2], outer)
    assert (told["state"], told["generation"], told["restarts"]) == ("degraded", 7, 3)
    assert told["xids"] == {"31": 2, "79": 2}
    assert told["last_incident"]["incident_id"] == "b"
    assert told["rung"] == {"index": 2}, "that of the one that answers"
    assert told["sensors"]["nvml"] == {"ok": True, "detail": "works"}
    assert told["sensors"]["gpu"] == {"ok": False, "detail": "card 0000:01:00: lost; card 0000:02:00: 1 card"}
    assert [(one["card"], one["restarts"]) for one in told["replicas"]] == [(CARDS[0], 1), (CARDS[1], 2)]
