"""SGLang's /generate gone on with: each event has all so far, over two engines as from one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.gateway.generated import Generated

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(text: str, ids: list[int], name: str = "first", prompt: int = 3, finish: str | None = None) -> bytes:
    """As SGLang streams it."""
    reason = None if finish is None else {"type": finish}
    about = {"id": name, "finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": len(ids)}
    return b"data: " + json.dumps({"text": text, "output_ids": ids, "meta_info": about}).encode() + b"\n\n"


def documents(events: bytes) -> list[Json]:
    """Those that are no [DONE]."""
    return [json.loads(one[6:]) for one in events.decode().split("\n\n") if one and one != "data: [DONE]"]


@pytest.mark.parametrize(
    ("asked", "put"),
    [({"text": "Say: "}, {"text": "Say: one two"}), ({"input_ids": [7, 8]}, {"input_ids": [7, 8, 1, 2]})],
)
def test_it_goes_on_behind_what_was_said(asked: Json, put: Json) -> None:
    """The prompt grows by it, the limit shrinks, and each event has the whole text, all ids, the first id, and counts that add up."""
    had = Generated()
    assert had.take(event("one", [1])) == event("one", [1])
    had.take(event("one two", [1, 2]))
    rest = had.going_on(json.dumps({**asked, "sampling_params": {"max_new_tokens": 5, "temperature": 0.5}, "stream": True}).encode())
    assert rest is not None
    assert json.loads(rest.body) == {**put, "sampling_params": {"max_new_tokens": 3, "temperature": 0.5}, "stream": True}
    out = rest.take(event(" three", [3], "second", 5) + event(" three four", [3, 4], "second", 5, "stop") + DONE)
    assert out.endswith(DONE)
    found = documents(out)
    assert [(one["text"], one["output_ids"]) for one in found] == [("one two three", [1, 2, 3]), ("one two three four", [1, 2, 3, 4])]
    abouts = [one["meta_info"] for one in found]
    assert [(one["id"], one["prompt_tokens"], one["completion_tokens"]) for one in abouts] == [("first", 3, 3), ("first", 3, 4)]
    assert [one["finish_reason"] for one in abouts] == [None, {"type": "stop"}]
    again = had.going_on(json.dumps({**asked, "sampling_params": {"max_new_tokens": 5}}).encode())
    assert again is not None
    assert again.take(event(" five", [5]) + DONE) == DONE, "it had said why it ended"


def test_a_text_that_is_complete_gets_its_end_and_no_more() -> None:
    """As many tokens as it may have: the next engine's one is for nobody."""
    had = Generated()
    had.take(event("one two", [1, 2]))
    rest = had.going_on(json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 2}}).encode())
    assert rest is not None
    assert json.loads(rest.body)["sampling_params"] == {"max_new_tokens": 1}
    (found,) = documents(rest.take(event(" three", [3], "second", 5, "length") + DONE))
    assert (found["text"], found["output_ids"], found["meta_info"]["completion_tokens"]) == ("one two", [1, 2], 2)
    assert found["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "x", "sampling_params": {"json_schema": "{}"}},
        {"text": "x", "sampling_params": {"n": 2}},
        {"text": "x", "return_logprob": True},
        {"text": ["x", "y"]},
        {"input_ids": [[1], [2]]},
    ],
)
def test_what_cannot_be_gone_on_with(asked: Json) -> None:
    """Forms, several answers, log probabilities, several prompts; and what has said nothing yet."""
    had = Generated()
    assert had.going_on(b'{"text": "x"}') is None
    had.take(event("one", [1]))
    assert had.going_on(json.dumps(asked).encode()) is None
