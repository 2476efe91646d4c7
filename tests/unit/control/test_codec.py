"""Core types <-> JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.control import codec
from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.core.incident import Incident
from appliance.core.launch import ContinuesBy, Endpoint, EngineLimits
from appliance.core.publication import Publication
from appliance.core.states import EngineState

FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
st.register_type_strategy(float, FINITE)
st.register_type_strategy(
    Endpoint,
    st.builds(Endpoint, socket_path=st.text(min_size=1, max_size=20).map(lambda name: f"/run/{name}"))
    | st.builds(Endpoint, port=st.integers(1, 65535)),
)
st.register_type_strategy(
    Evidence,
    st.builds(
        Evidence,
        source=st.sampled_from(Source),
        text=st.text(),
        time_s=st.none() | FINITE,
        line=st.integers(0, 10**6),
        boot_id=st.none() | st.text(),
        data=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=3),
    ),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.from_type(Publication))
def test_publication_round_trip(publication: Publication) -> None:
    """A publication that crossed the socket is equal to the one that was posted."""
    assert codec.publication_from_json(json.loads(json.dumps(codec.publication_to_json(publication)))) == publication


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.from_type(Incident))
def test_incident_round_trip(incident: Incident) -> None:
    """An incident with its diagnosis, action, rungs and evidence survives the round trip whole."""
    assert codec.incident_from_json(json.loads(json.dumps(codec.incident_to_json(incident)))) == incident


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
def test_causes_travel_as_their_label(cause: Cause) -> None:
    """The label, not the enum's tuple, is what people see in JSON."""
    assert codec.to_json(cause) == cause.label
    assert codec.from_json(Cause, cause.label) is cause


def publication_with(**changes: Any) -> dict[str, Any]:
    """A legal publication as JSON, with changes."""
    good = Publication(EngineState.SERVING, 3, Endpoint(socket_path="/run/e.sock"), EngineLimits("m", 1, 2, 3), "ok", None)
    return codec.publication_to_json(good) | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generation": "three"}, ("Publication.generation", "three", "int")),
        ({"generation": True}, ("Publication.generation", "int")),
        ({"state": "flying"}, ("Publication.state", "flying", "EngineState")),
        ({"endpoint": "tcp:9"}, ("Publication.endpoint", "tcp:9")),
        ({"limits": {"model_id": "m"}}, ("Publication.limits", "context_length_tokens")),
        ({"reason": None}, ("Publication.reason", "str")),
    ],
)
def test_wrong_values_name_their_path(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """What cannot be read is refused with the path of the field, the value and what was expected."""
    with pytest.raises(codec.CodecError) as caught:
        codec.publication_from_json(publication_with(**changes))
    for word in words:
        assert word in str(caught.value)


def test_unknown_keys_are_ignored() -> None:
    """A gateway of an older version reads what a newer applianced sends."""
    assert codec.publication_from_json(publication_with(colour="green")).generation == 3


def test_an_engines_way_to_go_on_travels_and_an_unknown_one_is_the_plainest() -> None:
    """`ids` arrives as it is; a word that only a newer version knows must not make the publication unreadable."""
    limits = EngineLimits("m", 1, 2, 3, continues_by=ContinuesBy.IDS)
    sent = json.loads(json.dumps(codec.to_json(limits)))
    assert sent["continues_by"] == "ids"
    assert codec.limits_from_json(sent) == limits
    assert codec.limits_from_json(sent | {"continues_by": "telepathy"}).continues_by is ContinuesBy.REPLAY


def test_values_without_json_form_become_text() -> None:
    """Evidence data of any kind can be stored: NaN and bytes become their text instead of an error."""
    shown = codec.evidence_to_json(Evidence(Source.EXIT, "x", data={"odd": float("nan"), "raw": b"\xff"}))
    assert json.loads(json.dumps(shown, allow_nan=False))["data"] == {"odd": "nan", "raw": "b'\\xff'"}
