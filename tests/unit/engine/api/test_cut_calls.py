"""Calls that max_tokens cut: a client gets the tool and its arguments as far as they came, and never a model's own marks as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.api.calls import ToolCall, reader_of
from appliance.engine.dialect import TOOL_CALL, TOOL_CALLS, Dialect
from tests.fakes.tool_templates import FAMILIES, family_folder
from tests.unit.engine.api.test_dialects import HELLO, NAMES, PARIS, TOOLS, rendered_call, saying

Json = dict[str, Any]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: family_folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def check_cut(message: Any, named: bool) -> bool:
    """No text, and no more than one call, whose arguments are a beginning of the whole ones. Whether there is one."""
    assert not message.content
    calls = message.tool_calls or []
    assert len(calls) <= 1
    assert calls or not named
    for call in calls:
        assert call.function.name == "get_weather"
        whole = json.dumps(PARIS["arguments"], ensure_ascii=False)
        assert whole.startswith(call.function.arguments.replace("\ufffd", "")), call.function.arguments  # half of the emoji
    return bool(calls)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_demanded_call_that_was_cut_is_a_call(family: str, choice: Any, folders: dict[str, Path]) -> None:
    """After any number of tokens: `length`, nothing but the call, and the same whole as in a stream; once a name is there it is told."""
    said = rendered_call(folders[family], PARIS).lstrip()
    async with saying(folders[family], said) as (one, client):
        count = len(one.text.encode(said, add_special_tokens=False, most_tokens=1000))
        asked: Json = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": choice}
        found = []
        for most in range(1, count - 1):
            answer = (await client.chat.completions.create(**asked, max_tokens=most)).choices[0]
            assert answer.finish_reason == "length"
            found.append(check_cut(answer.message, choice is NAMED))
            streamed = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, max_tokens=most, stream=True)]
            assert not "".join(one.delta.content or "" for one in streamed)
            told = [call for one in streamed for call in one.delta.tool_calls or []]
            whole = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []]
            assert [(call.function.name, call.function.arguments) for call in told if call.function] == whole
            assert streamed[-1].finish_reason == "length"
        assert found == sorted(found)
        assert found[-1]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_call_of_its_own_choice_that_was_cut_is_one_once_its_name_is_there(family: str, folders: dict[str, Path]) -> None:
    """Behind a mark there is no text before that either: no client can use half a name. Without one it may have become anything."""
    said = rendered_call(folders[family], PARIS).lstrip()
    async with saying(folders[family], said) as (one, client):
        count = len(one.text.encode(said, add_special_tokens=False, most_tokens=1000))
        asked: Json = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
        found = []
        for most in range(1, count - 1):
            answer = (await client.chat.completions.create(**asked, max_tokens=most)).choices[0]
            assert answer.finish_reason == "length"
            found.append(bool(answer.message.tool_calls))
            if found[-1]:
                check_cut(answer.message, named=True)
            streamed = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, max_tokens=most, stream=True)]
            assert "".join(one.delta.content or "" for one in streamed) == (answer.message.content or "")
            assert family.startswith("llama") or any(mark.startswith(answer.message.content or "") for mark in (TOOL_CALL, TOOL_CALLS))
        assert found == sorted(found)
        assert found[-1]


CUT = [
    # what was said, what of it is text, the calls
    (Dialect.HERMES, 'So: <tool_call>{"name": "now", "argum', "So:", [ToolCall("now", "")]),
    (Dialect.HERMES, '<tool_call>{"name": "now", "arguments": {"a": [1, {"b": "}"}', "", [ToolCall("now", '{"a": [1, {"b": "}"}')]),
    (Dialect.HERMES, '<tool_call>{"name": "now", "arguments": {}', "", [ToolCall("now", "{}")]),
    (Dialect.HERMES, '<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "no', None, [ToolCall("now", "{}")]),
    (Dialect.HERMES, '<tool_call>{"name": "elsewhere", "arguments": {"a', None, []),
    (Dialect.HERMES, "<tool_call>{no json}</tool_call> do", "<tool_call>{no json}</tool_call> do", []),
    (Dialect.LLAMA, '{"name": "now", "parameters": {"a": "b', "", [ToolCall("now", '{"a": "b')]),
    (Dialect.LLAMA, '{"type": "function", "function": "now", "parameters": {', "", [ToolCall("now", "{")]),
    (Dialect.LLAMA, '{"name": "now"}', '{"name": "now"}', []),
    (Dialect.LLAMA, '{"nation": "now', '{"nation": "now', []),
    (Dialect.MISTRAL_LIST, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now', "", [ToolCall("now", "{}")]),
    (Dialect.MISTRAL_LIST, '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1', "", [ToolCall("now", '{"a": 1')]),
    (Dialect.MISTRAL_NAMED, "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]", "", [ToolCall("now", "{}"), ToolCall("now", "")]),
    (Dialect.MISTRAL_NAMED, "[TOOL_CALLS]no", "", []),
    (Dialect.MISTRAL_NAMED, "[TOOL_CALLS]now[AR", "", []),
    (Dialect.MISTRAL_NAMED, "[TOOL_CALLS]elsew", "[TOOL_CALLS]elsew", []),
    (Dialect.MISTRAL_LIST, 'So: [TOOL_CALLS] [{"na', "So:", []),
    (Dialect.HERMES, "So: <tool_call>", "So:", []),
    (Dialect.HERMES, '<tool_call>\n{ "name" : "no', "", []),
    (Dialect.HERMES, '<tool_call>{"type": "function", "function": "n', "", []),
    (Dialect.HERMES, '<tool_call>{"arguments": {"a": "<b>"}, "na', "", []),
    (Dialect.HERMES, '<tool_call>{"name": "els', '<tool_call>{"name": "els', []),
    (Dialect.HERMES, "<tool_call> is a tag", "<tool_call> is a tag", []),
    (Dialect.LLAMA, '<|python_tag|>{"name": "no', "", []),
    (Dialect.LLAMA, "<|python_tag|>print(", "<|python_tag|>print(", []),
    (Dialect.LLAMA, '{"name": "no', '{"name": "no', []),
    (Dialect.MISTRAL_NUMBERED, '[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{"a', "", [ToolCall("now", '{"a')]),
]


@pytest.mark.parametrize(("dialect", "text", "said", "calls"), CUT)
def test_what_is_told_of_a_cut_call(dialect: Dialect, text: str, said: str | None, calls: list[ToolCall]) -> None:
    """Calls of tools that were offered, complete ones too; the rest stays text. None: whatever text."""
    reader = reader_of(dialect, True, NAMES)
    fed, flushed = reader.feed(text), reader.flush(cut=True)
    assert [*fed[1], *flushed[1]] == calls
    assert reader.calls == len(calls)
    assert said is None or fed[0] + flushed[0] == said


def test_an_answer_that_was_not_cut_is_read_as_ever() -> None:
    """A model that ends in the middle of a call has made none."""
    reader = reader_of(Dialect.HERMES, True, NAMES)
    text = '<tool_call>{"name": "now", "arguments": {"a'
    fed, flushed = reader.feed(text), reader.flush()
    assert (fed[0] + flushed[0], fed[1] + flushed[1]) == (text, [])


@pytest.mark.parametrize("kind", ["any", "auto"])
async def test_anthropic_gets_a_cut_call_as_a_block(kind: str, folders: dict[str, Path]) -> None:
    """`max_tokens` for a reason, and no text of the model's marks, wherever it was cut; a stream says the same."""
    said = rendered_call(folders["qwen"], PARIS).lstrip()
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    async with saying(folders["qwen"], said) as (one, _):
        named = len(one.text.encode(said.partition("Paris")[0], add_special_tokens=False, most_tokens=1000))
        count = len(one.text.encode(said, add_special_tokens=False, most_tokens=1000))
        for most in range(1, count):
            body = {"messages": HELLO, "tools": tools, "tool_choice": {"type": kind}, "max_tokens": most}
            answer = (await one.post("/v1/messages", body)).json
            blocks = [(block["type"], block.get("name", block.get("text"))) for block in answer["content"]]
            if most >= named:
                assert blocks == [("tool_use", "get_weather")]
            else:
                assert blocks == [("tool_use", "get_weather")] or TOOL_CALL[: 0 if kind == "any" else -1].startswith(blocks[0][1])
            assert answer["stop_reason"] == "max_tokens"
            events = (await one.post("/v1/messages", {**body, "stream": True})).events
            assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == [blocks[0][0]]
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
            assert blocks[0][0] == "tool_use" or "".join(delta["text"] for delta in deltas) == blocks[0][1]
