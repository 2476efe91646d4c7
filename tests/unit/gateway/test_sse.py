"""Whole events, preludes and endings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.envelope import Refused
from appliance.gateway.sse import (
    EVENT_MAX_BYTES,
    Dialect,
    Framer,
    as_events,
    dialect_of,
    error_event,
    is_engine_failure,
    is_prelude,
    is_read_by_hand,
)

DONE = b"data: [DONE]\n\n"


def chat(**delta: object) -> bytes:
    """A chunk of a chat stream."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


EVENTS = [b"data: a\n\n", b"data: {}\r\n\r\n", b": ping\n\n", chat(content="\n")]


@given(events=st.lists(st.sampled_from(EVENTS), max_size=8), data=st.data())
def test_however_it_is_cut_only_whole_events_come_out_and_all_of_them(events: list[bytes], data: st.DataObject) -> None:
    """Concatenation is kept, and every output ends with an event's end."""
    stream = b"".join(events)
    framer, out, position = Framer(), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        out.append(framer.feed(stream[position : position + size]))
        position += size
    assert all(piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in out)
    assert b"".join(out) + framer.rest() == stream
    assert framer.rest() in (b"", *(event[:-1] for event in events))


def test_the_usual_chunk_is_not_copied() -> None:
    """What is whole already is returned as the same object: this is the path of every token."""
    event = chat(content="x")
    assert Framer().feed(event) is event


def test_an_event_without_end_is_let_go() -> None:
    """Memory is bounded by passing it on in pieces."""
    framer = Framer()
    assert framer.feed(b"data: " + b"x" * 1000) == b""
    assert len(framer.feed(b"x" * EVENT_MAX_BYTES)) > EVENT_MAX_BYTES
    assert framer.rest() == b""


@pytest.mark.parametrize(
    ("dialect", "stream", "finished"),
    [
        (Dialect.OPENAI, [chat(content="x"), DONE], True),
        (Dialect.OPENAI, [chat(content="x") + DONE], True),
        (Dialect.OPENAI, [b"data:[DONE]\r\n\r\n"], True),
        (Dialect.OPENAI, [chat(content="x"), b"data: [DONE]\n"], True),
        (Dialect.OPENAI, [chat(content="x"), b"data: [DO", b"NE]\n\n"], True),
        (Dialect.OPENAI, [b'data: {"error": {"message": "no"}}\n\n'], True),
        (Dialect.OPENAI, [chat(content="x")], False),
        (Dialect.OPENAI, [DONE, chat(content="x")], False),
        (Dialect.OPENAI, [chat(content="data: [DONE]")], False),
        (Dialect.OPENAI, [chat(content="x"), b"data: {"], False),
        (Dialect.OPENAI, [], False),
        (Dialect.ANTHROPIC, [b'event: message_stop\ndata: {"type": "message_stop"}\n\n'], True),
        (Dialect.ANTHROPIC, [b'event: error\ndata: {"type": "error"}\n\n'], True),
        (Dialect.ANTHROPIC, [b'event: content_block_delta\ndata: {"text": "event: message_stop"}\n\n'], False),
        (Dialect.RESPONSES, [b'event: response.completed\ndata: {"response": {}}\n\n'], True),
        (Dialect.RESPONSES, [b"event: response.output_text.delta\ndata: {}\n\n"], False),
    ],
)
def test_a_stream_is_finished_by_its_own_last_event_only(dialect: Dialect, stream: list[bytes], finished: bool) -> None:
    """Or by an error; text that looks like an ending is not one."""
    framer = Framer()
    for piece in stream:
        framer.feed(piece)
    assert framer.finished(dialect) is finished


@pytest.mark.parametrize(
    ("event", "prelude"),
    [
        (chat(role="assistant"), True),
        (chat(role="assistant", content=""), True),
        (chat(role="assistant", content=None, reasoning_content=None), True),
        (b": ping\n\n", True),
        (chat(role="assistant") + b": ping\n\n", True),
        (chat(content="x"), False),
        (chat(role="assistant") + chat(content="x"), False),
        (chat(reasoning_content="hm"), False),
        (chat(tool_calls=[{"index": 0}]), False),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', False),
        (b'data: {"choices": [{"text": "x"}]}\n\n', False),
        (b'data: {"choices": [], "usage": {}}\n\n', False),
        (b'data: {"error": {"message": "no"}, "choices": [{"delta": {}}]}\n\n', False),
        (b'data: {"text": "x", "output_ids": [1]}\n\n', False),
        (b"data: not json\n\n", False),
        (b"data: [1]\n\n", False),
        (DONE, False),
        (b'event: message_start\ndata: {"type": "message_start"}\n\n', True),
        (b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n', False),
        (b'event: response.created\ndata: {"type": "response.created"}\n\n', True),
    ],
)
def test_a_prelude_is_what_carries_nothing_of_the_answer(event: bytes, prelude: bool) -> None:
    """It may be held back; everything else, and everything unknown, is passed on."""
    assert is_prelude(event) is prelude


def test_each_dialect_has_its_error_event() -> None:
    """OpenAI's envelope, Anthropic's and the Responses API's; each is itself an ending."""
    refused = Refused(503, "engine_lost", "gone", incident_id="inc-1")
    for dialect in (Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.RESPONSES):
        framer = Framer()
        framer.feed(error_event(refused, dialect))
        assert framer.finished(dialect)
        assert b"inc-1" in error_event(refused, dialect)
    assert json.loads(error_event(refused, Dialect.OPENAI).removeprefix(b"data: "))["error"]["code"] == "engine_lost"
    assert b'"overloaded_error"' in error_event(refused, Dialect.ANTHROPIC)


def test_a_whole_answer_becomes_one_event() -> None:
    """Also one that is laid out over several lines."""
    events = as_events(b'{\n "a": 1\r\n}').split(b"\n\n")
    assert json.loads(events[0].removeprefix(b"data: ")) == {"a": 1}
    assert events[1] == b"data: [DONE]"


def test_the_path_says_the_dialect() -> None:
    """SGLang's /generate speaks as OpenAI does."""
    assert dialect_of("/v1/messages") is Dialect.ANTHROPIC
    assert dialect_of("/v1/responses") is Dialect.RESPONSES
    assert dialect_of("/v1/threads/runs") is Dialect.UNKNOWN
    assert {dialect_of(path) for path in ("/generate", "/v1/chat/completions", "/v1/completions")} == {Dialect.OPENAI}


@pytest.mark.parametrize(
    ("event", "fails"),
    [
        (
            b'data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}',
            True,
        ),
        (b'data: {"error":{"object":"error","message":"x","type":"InternalServerError","code":503}}', True),
        (b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}', False),
        (b'data: {"error": {"message": "no", "type": "server_error", "code": "generation_failed"}}', False),
        (b'data: {"choices": [{"delta": {"content": "{\\"error\\": {\\"code\\": 500}}"}}]}', False),
    ],
)
def test_an_engines_own_failure_is_told_from_a_clients(event: bytes, fails: bool) -> None:
    """SGLang and vLLM number theirs as HTTP does; what a model writes is never one."""
    assert is_engine_failure(chat(content="a") + event + b"\n\n") is fails


@pytest.mark.parametrize(
    ("user_agent", "by_hand"),
    [
        (b"Python/3.11 aiohttp/3.13.2", True),
        (b"OpenAI/Python 3.51.0", False),
        (b"AsyncOpenAI/Python 3.51.0", False),
        (b"curl/7.88.1", False),
        (b"", False),
        (None, False),
    ],
)
def test_who_cannot_be_told_a_comment(user_agent: bytes | None, by_hand: bool) -> None:
    """Programs on aiohttp, which knows nothing of events; not those of whom nothing is known."""
    assert is_read_by_hand(user_agent) is by_hand
