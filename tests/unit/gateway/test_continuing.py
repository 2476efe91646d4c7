"""The request that goes on behind a text, and the seam."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.gateway.continuing import Rest, going_on
from appliance.gateway.said import Said

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def event(document: Json) -> bytes:
    """As it stands in a stream."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    """A chunk of a chat."""
    return event({"id": "first", "choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": None}]})


def said(*texts: str) -> Said:
    """A stream so far."""
    found = Said()
    found.take(delta("", role="assistant"))
    for text in texts:
        found.take(delta(text))
    return found


def test_the_text_becomes_the_message_to_finish() -> None:
    """Without its white space at the end; limits of the whole answer are what is left of them."""
    body = json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 10, "min_tokens": 1, "temperature": 0.7}).encode()
    request = going_on(CHAT, body, said("One", " two", "\n"))
    assert request is not None
    document = json.loads(request.body)
    assert document["messages"] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "One two"}]
    assert (document["continue_final_message"], document["add_generation_prompt"]) == (True, False)
    assert (document["max_tokens"], document["min_tokens"], document["temperature"]) == (7, 0, 0.7)
    assert (request.seam, request.tokens) == ("\n", 3)


def test_a_message_that_the_client_had_begun_itself_grows() -> None:
    """It is one message."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So: "}]
    body = json.dumps({"messages": messages, "continue_final_message": True, "add_generation_prompt": False}).encode()
    request = going_on(CHAT, body, said("one"))
    assert request is not None
    assert json.loads(request.body)["messages"] == [messages[0], {"role": "assistant", "content": "So: one"}]


def test_what_cannot_be_gone_on_with() -> None:
    """Nothing but white space, a prompt of ids, a text that has ended, more than a text."""
    body = json.dumps({"messages": [{"role": "user", "content": "q"}], "prompt": [1, 2]}).encode()
    ended, calls, thought = said("x"), said("x"), said("x")
    ended.take(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    calls.take(event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{"}}]}}]}))
    thought.take(event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}))
    for one in (said(), said(" ", "\n"), ended, calls, thought):
        assert going_on(CHAT, body, one) is None
    assert going_on(TEXT, body, said("x")) is None


@pytest.mark.parametrize(
    ("had", "comes", "together"),
    [
        ("one ", [" two"], "one two"),
        ("one ", ["two"], "one two"),
        ("one \n", [" ", "\n", "two"], "one \ntwo"),
        ("one \n", [" two"], "one \ntwo"),
        ("one", [" two", " three"], "one two three"),
        ("one ", ["", " ", " two"], "one  two"),
    ],
)
def test_the_seam_is_said_once(had: str, comes: list[str], together: str) -> None:
    """Whether the engine says the white space again that its template took away, or not."""
    before = said(had)
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(), before)
    assert request is not None
    rest = Rest(before, request)
    out = b"".join(rest.take(delta(text)) for text in comes)
    texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in out.decode().split("\n\n") if line]
    assert had + "".join(texts) == together
