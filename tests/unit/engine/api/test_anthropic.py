"""/v1/messages as Anthropic's clients know it. (That answers go on over a crash: test_continuation.py.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.text import ModelText
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Answer, served

Json = dict[str, Any]
PATH = "/v1/messages"
BODY: Json = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
SAID = "A river “flows”."


def saying(text: ModelText) -> ScriptedEngine:
    """One that says SAID and ends."""
    ids = text.encode(SAID, add_special_tokens=False, most_tokens=1000)
    return ScriptedEngine(lambda _: (*ids, *text.end_token_ids))


def named(answer: Answer) -> list[tuple[str, Json]]:
    """The events of a stream with their names."""
    found = []
    for block in answer.body.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_whole_answer(folder: Path) -> None:
    """Type, role, one text block, why it ended, the usage."""
    text = ModelText(folder)
    async with served(saying(text), folder) as one:
        answer = (await one.post(PATH, BODY)).json
        prompt_tokens = len(one.engine.submitted[0].prompt_ids)
    assert answer["id"].startswith("msg-")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": SAID}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    ids = text.encode(SAID, add_special_tokens=False, most_tokens=1000)
    assert answer["usage"] == {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(ids),
    }


async def test_a_stream_has_the_events_in_their_order(folder: Path) -> None:
    """Each with its name, and no [DONE]."""
    async with served(saying(ModelText(folder)), folder) as one:
        events = named(await one.post(PATH, {**BODY, "stream": True}))
    assert all(name == document["type"] for name, document in events)
    names = [name for name, _ in events]
    texts = [document["delta"]["text"] for name, document in events if name == "content_block_delta"]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert "".join(texts) == SAID
    start, delta = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == delta["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_why_it_ended(folder: Path) -> None:
    """A stop sequence is named; a limit is max_tokens."""
    async with served(saying(ModelText(folder)), folder) as one:
        stopped = (await one.post(PATH, {**BODY, "stop_sequences": ["flow", "zzz"]})).json
        short = (await one.post(PATH, {**BODY, "max_tokens": 3})).json
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == ("A river “", "stop_sequence", "flow")
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 3)


async def test_the_prompt_is_the_one_of_the_chat_endpoint(folder: Path) -> None:
    """System, in either form, and text blocks; and count_tokens says how long it is."""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    async with served(ScriptedEngine(), folder) as one:
        for body in ({**BODY, "system": "Be brief."}, {**BODY, "system": system, "messages": blocks}):
            counted = await one.post(f"{PATH}/count_tokens", {name: body[name] for name in ("model", "messages", "system")})
            assert (await one.post(PATH, body)).status == 200
            assert counted.json == {"input_tokens": len(one.engine.submitted[-1].prompt_ids)}
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        await one.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        assert len({request.prompt_ids for request in one.engine.submitted}) == 1


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "neither user nor assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages[1]", "given beginning"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]", "'image'"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools", "in no form that is known here"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", "not supported"),
        ({"stop_sequences": [1]}, "stop_sequences", "list of strings"),
        ({"max_tokns": 5}, "max_tokns", "did you mean max_tokens"),
    ],
)
async def test_what_it_does_not_have_is_refused_by_name(folder: Path, change: Json, param: str, words: str) -> None:
    """And not passed over in silence."""
    async with served(ScriptedEngine(), folder) as one:
        answer = await one.post(PATH, {**BODY, **change})
    assert answer.status == 400
    assert (answer.error["param"], words in answer.error["message"]) == (param, True), answer.error


async def test_an_answer_that_fails_inside_its_stream_says_so_in_an_event(folder: Path) -> None:
    """Named `error`, of type `error`, and nothing after it."""
    async with served(ScriptedEngine(), folder) as one:
        one.engine.fail_after, one.engine.step_s = 3, 0.05
        events = named(await one.post(PATH, {**BODY, "stream": True}))
    assert events[-1][0] == "error"
    assert events[-1][1]["type"] == "error"
    assert "free" in events[-1][1]["error"]["message"]
