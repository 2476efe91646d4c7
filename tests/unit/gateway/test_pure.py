"""The gateway's decisions and translations: no sockets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.launch import Endpoint
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.gateway.envelope import Refused, in_envelope
from appliance.gateway.gate import STOPPED_HOLD_S, Standing, View, sentence_of, standing_of
from appliance.gateway.headers import downstream, legal_request_id, upstream_head
from appliance.gateway.inflight import KEY_BYTES, fingerprint, load_key, new_request_id
from appliance.gateway.intake import facts_of
from appliance.gateway.routes import PAGES, Kind, route_of

SERVING = Publication(EngineState.SERVING, 3, Endpoint(port=1234), None, "serving", None)


@pytest.mark.parametrize(
    ("view", "standing"),
    [
        (View(), Standing.HOLD),
        (View(SERVING, True), Standing.OPEN),
        (View(SERVING, False, "away"), Standing.OPEN),
        (View(SERVING, True, "", "reset"), Standing.HOLD),
        (View(replace(SERVING, endpoint=None), True), Standing.HOLD),
        (View(replace(SERVING, state=EngineState.PARKED), True), Standing.REFUSE),
        (View(replace(SERVING, state=EngineState.STOPPED), True), Standing.HOLD),
        (View(replace(SERVING, state=EngineState.STOPPED), True, stopped_s=STOPPED_HOLD_S), Standing.REFUSE),
    ],
)
def test_the_standing_follows_from_what_is_known(view: View, standing: Standing) -> None:
    """Open, hold, or refuse."""
    assert standing_of(view) is standing


@pytest.mark.parametrize("state", list(EngineState))
def test_every_state_has_a_standing_and_a_sentence(state: EngineState) -> None:
    """Only serving states are open; a publication without a reason is still put into words."""
    view = View(replace(SERVING, state=state, reason=""), True)
    assert (standing_of(view) is Standing.OPEN) == (state in (EngineState.SERVING, EngineState.DEGRADED))
    assert sentence_of(view) == f"the engine is {state.value.replace('_', ' ')}"


def test_the_sentence_blames_applianced_only_when_the_engine_is_away_too() -> None:
    """While the engine serves, nobody needs to hear of it."""
    assert sentence_of(View(SERVING, False, "nobody listens")) == "serving"
    stopped = Publication(EngineState.STOPPED, 1, None, None, "stopped", None)
    assert sentence_of(View(stopped, True)) == "stopped"
    assert sentence_of(View(stopped, False, "nobody listens")) == "the engine was stopped, and applianced does not run: nobody listens"
    assert sentence_of(View(SERVING, False, "nobody listens", "refused")).startswith("applianced is not answering (nobody listens)")
    assert sentence_of(View(None, False, "nobody listens")) == "applianced is not answering: nobody listens"


@pytest.mark.parametrize(
    ("method", "path", "kind", "slot"),
    [
        ("POST", "/v1/chat/completions", Kind.JSON, True),
        ("POST", "/generate", Kind.JSON, True),
        ("POST", "/tokenize", Kind.JSON, False),
        ("GET", "/v1/models", Kind.OTHER, False),
        ("POST", "/v1/audio/transcriptions", Kind.OTHER, True),
        *((("GET", page, Kind.PAGE, False)) for page in PAGES),
    ],
)
def test_routes(method: str, path: str, kind: Kind, slot: bool) -> None:
    """Kind and whether it takes a slot."""
    route = route_of(method, path)
    assert (route.kind, route.takes_slot) == (kind, slot)


@pytest.mark.parametrize("path", ["", "/v1", "/v1x", "/v2/chat", "/flush_cache", "/v1/../generate", "/v1/.hidden", "/v1//models", "*"])
def test_no_path_outside_the_api_reaches_the_engine(path: str) -> None:
    """404."""
    with pytest.raises(Refused) as refused:
        route_of("POST", path)
    assert refused.value.status == 404


def test_any_path_has_one_of_few_labels() -> None:
    """Metrics stay bounded whatever clients ask for."""
    assert route_of("GET", "/v1/files/abc").label == route_of("POST", "/v1/other").label == "/v1/*"


def test_the_head_for_the_engine() -> None:
    """Framing is ours, the connection's own headers stay behind, the id goes on."""
    headers = [(b"host", b"h"), (b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"content-length", b"9"), (b"x-other", b"2")]
    head = upstream_head("POST", b"/generate?a=1", headers, "req-1", 2)
    assert head == b"POST /generate?a=1 HTTP/1.1\r\nhost: engine\r\nx-request-id: req-1\r\nx-other: 2\r\ncontent-length: 2\r\n\r\n"
    assert b"content-length" not in upstream_head("GET", b"/v1/models", [], "r", 0)


def test_the_headers_for_the_client() -> None:
    """Neither length nor framing, nor what the engine's connection said."""
    headers = [
        (b"content-type", b"a/b"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"x-hop"),
        (b"x-hop", b"1"),
        (b"server", b"uvicorn"),
    ]
    assert downstream(headers) == [(b"content-type", b"a/b")]


@given(st.binary(max_size=200))
def test_a_request_id_is_legal_only_as_a_plain_word(value: bytes) -> None:
    """What comes back can stand in a header and a log line."""
    found = legal_request_id([(b"x-request-id", value)])
    assert found is None or (found.isascii() and found.isprintable() and 0 < len(found) <= 128 and " " not in found)


def test_request_ids_are_unique() -> None:
    """And look like ours."""
    ids = {new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.startswith("req-") for one in ids)


@given(st.binary(max_size=300), st.sampled_from([400, 404, 500, 503]))
def test_any_error_body_becomes_an_envelope(body: bytes, status: int) -> None:
    """With message, type, param and code."""
    error = json.loads(in_envelope(status, body))["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]


def test_a_whole_envelope_is_returned_as_it_is() -> None:
    """The same bytes."""
    body = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": None}}).encode()
    assert in_envelope(400, body) is body


def test_a_refusal_in_the_envelope() -> None:
    """Retry-After is whole seconds, at least one."""
    refused = Refused(503, "engine_unavailable", "away", hint="wait", retry_after_s=0.2, incident_id="inc-1")
    assert json.loads(refused.body())["error"] == {
        "message": "away; wait",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
        "incident_id": "inc-1",
    }
    assert (b"retry-after", b"1") in refused.headers()


@given(st.binary(max_size=400) | st.text(max_size=100).map(lambda text: json.dumps({"a": text}).encode()))
def test_any_body_is_facts_or_a_refusal(body: bytes) -> None:
    """No other exception."""
    try:
        facts_of(body)
    except Refused as refused:
        assert refused.status == 400


def test_only_true_asks_for_a_stream() -> None:
    """Whether "yes" is an error is the engine's to say."""
    assert facts_of(b'{"stream": true}').stream
    assert not any(facts_of(body).stream for body in (b"{}", b'{"stream": false}', b'{"stream": "yes"}', b'{"stream": 1}'))


def test_fingerprints_are_keyed() -> None:
    """Equal bodies agree under one key; another box's differ; nothing of the body is in it."""
    assert fingerprint(b"k", b"body") == fingerprint(b"k", b"body") != fingerprint(b"other", b"body")
    assert len(fingerprint(b"k", b"body")) == 32


def test_the_key_survives_and_a_broken_one_is_not_used(tmp_path: Path) -> None:
    """Made once, kept private; a truncated file or an unwritable folder means a key for this life only."""
    key = load_key(tmp_path / "state")
    assert load_key(tmp_path / "state") == key
    (tmp_path / "state" / "fingerprint.key").write_bytes(b"short")
    assert len(load_key(tmp_path / "state")) == KEY_BYTES
    (tmp_path / "file").write_text("")
    assert len(load_key(tmp_path / "file")) == KEY_BYTES
