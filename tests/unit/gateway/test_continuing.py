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
    # The line break is said again, and so is one of what is left.
    assert (document["max_tokens"], document["min_tokens"], document["temperature"]) == (8, 0, 0.7)
    assert (request.seam, request.tokens) == ("\n", 2)


def test_a_message_that_the_client_had_begun_itself_grows() -> None:
    """It is one message."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So: "}]
    body = json.dumps({"messages": messages, "continue_final_message": True, "add_generation_prompt": False}).encode()
    request = going_on(CHAT, body, said("one"))
    assert request is not None
    assert json.loads(request.body)["messages"] == [messages[0], {"role": "assistant", "content": "So: one"}]


def test_what_cannot_be_gone_on_with() -> None:
    """Nothing, more than a text, and what is put to the engine as token ids."""
    body = json.dumps({"messages": [{"role": "user", "content": "q"}], "prompt": [1, 2]}).encode()
    calls, thought = said("x"), said("x")
    calls.take(event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{"}}]}}]}))
    thought.take(event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}))
    for one in (said(), calls, thought):
        assert going_on(CHAT, body, one) is None
    assert going_on(TEXT, body, said("x")) is None


def test_white_space_is_said_again_from_the_start() -> None:
    """No template would leave it there: the question is put as it was, and the white space is swallowed."""
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    before = said("\n", "\n")
    request = going_on(CHAT, json.dumps(body).encode(), before)
    assert request is not None
    assert json.loads(request.body) == body
    assert texts_in(Rest(before, request).take(delta("\n\n") + delta("Well"))) == ["Well"]


def test_a_limit_of_none_is_left_alone() -> None:
    """-1, llama.cpp's word for it, less by what was said would be an end."""
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": -1}).encode(), said("One"))
    assert request is not None
    assert json.loads(request.body)["max_tokens"] == -1


def usage(prompt: int, answer: int) -> bytes:
    """The event that tells it."""
    counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return event({"id": "second", "choices": [], "usage": counts})


def finish(reason: str) -> bytes:
    """The event that tells why."""
    return event({"id": "second", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def test_the_usage_adds_up_whatever_is_said_again() -> None:
    """A line break at the end of what was sent is in no prompt, and is counted once: where it is said again."""
    before = said("One", " two", "\n", "\n")
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(), before)
    assert request is not None
    rest = Rest(before, request)
    out = rest.take(delta("\n") + delta("\n") + delta("three") + finish("stop") + usage(39 + 2, 3))
    (last,) = [json.loads(one[6:]) for one in out.decode().split("\n\n") if '"usage"' in one]
    assert last["usage"] == {"prompt_tokens": 39, "completion_tokens": 5, "total_tokens": 44}


def test_the_usage_is_exact_where_the_engine_tells_it_with_each_event() -> None:
    """However the text is cut into tokens the second time, and however many of them came in one event."""

    def counted(text: str, prompt: int, answer: int) -> bytes:
        counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return event({"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": counts})

    before = Said()
    before.take(counted("", 39, 0) + counted("One", 39, 2) + counted(" two", 39, 5))
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 7}).encode(), before)
    assert request is not None
    assert json.loads(request.body)["max_tokens"] == 2
    out = Rest(before, request).take(counted(" three", 43, 1) + counted(" four", 43, 2) + finish("length") + usage(43, 2))
    usages = [json.loads(one[6:]).get("usage") for one in out.decode().split("\n\n") if one]
    told = [(one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) for one in usages if one]
    assert told == [(39, 6, 45), (39, 7, 46), (39, 7, 46)]


def test_a_message_s_usage_is_measured_against_the_prompt_that_its_first_event_told() -> None:
    """However many tokens came in one event (vLLM puts several into one when it is busy)."""
    before = Said()
    about = {"id": "m", "usage": {"input_tokens": 7, "cache_read_input_tokens": 32, "output_tokens": 0}}
    before.take(event({"type": "message_start", "message": about}))
    for text in ("One two", " three"):
        before.take(event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}))
    request = going_on("/v1/messages", json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}).encode(), before)
    assert request is not None
    out = Rest(before, request).take(delta(" four") + finish("stop") + usage(39 + 3, 2))
    (last,) = [json.loads(one[6:]) for one in out.decode().split("\n\n") if '"usage"' in one]
    assert last["usage"] == {"prompt_tokens": 39, "completion_tokens": 5, "total_tokens": 44}


@pytest.mark.parametrize("ended", [False, True])
def test_a_text_that_is_complete_gets_its_end_and_no_more(ended: bool) -> None:
    """An engine that dies behind the last token, before or behind the reason: the next one is asked for one token, which nobody gets."""
    before = said("One", " two", " three")
    if ended:
        before.take(event({"id": "first", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 3}).encode(), before)
    assert request is not None
    assert json.loads(request.body)["max_tokens"] == 1
    out = Rest(before, request).take(delta("", role="assistant") + delta(" four") + finish("stop") + usage(39 + 3, 1) + b"data: [DONE]\n\n")
    *events, done = [one[6:] for one in out.decode().split("\n\n") if one]
    documents = [json.loads(one) for one in events]
    assert done == "[DONE]"
    assert "four" not in out.decode()
    assert [choice["finish_reason"] for one in documents for choice in one["choices"]] == ([] if ended else ["length"])
    assert documents[-1]["usage"] == {"prompt_tokens": 39, "completion_tokens": 3, "total_tokens": 42}
    assert {one["id"] for one in documents} == {"first"}


def test_a_text_that_had_stopped_is_not_gone_on_with() -> None:
    """Without any limit of its own, too."""
    before = said("One")
    before.take(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    before.take(usage(39, 2))
    request = going_on(CHAT, json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(), before)
    assert request is not None
    assert json.loads(request.body)["max_tokens"] == 1
    assert Rest(before, request).take(delta(" two") + finish("length") + usage(40, 1) + b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def texts_in(events: bytes) -> list[str]:
    """Of deltas."""
    return [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in events.decode().split("\n\n") if line]


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
    assert had + "".join(texts_in(out)) == together
