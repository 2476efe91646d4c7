"""Tools: the model is told of them, its calls come out as OpenAI's, whole and streamed, and a demanded call cannot be missed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.api.calls import CallReader, ToolCall
from appliance.engine.api.fields import Fields
from appliance.engine.api.forced_calls import forced_calls
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.tools import read_tools
from appliance.engine.text import ModelText
from tests.fakes.model_folder import CHATML, byte_level_folder
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, served

HELLO = [{"role": "user", "content": "Weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\nCall by <tool_call>:' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("qwen"), template=QWEN)


@contextlib.asynccontextmanager
async def saying(folder: Path, said: str) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    text = ModelText(folder)
    ids = (*text.encode(said, add_special_tokens=False, most_tokens=1000), *text.end_token_ids)
    async with served(ScriptedEngine(lambda _request: ids, context=2000), folder) as one:
        yield one, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)


async def test_calls_come_out_whole(qwen: Path) -> None:
    """Text before them is content, two are two, arguments are JSON, the reason is theirs; ids differ and last over a repeat."""
    async with saying(qwen, f"Let me see.\n{PARIS}\n{NOW}") as (one, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("get_weather", {"city": "Paris 🙂"}),
            ("now", {}),
        ]
        assert len({call.id for call in calls}) == 2
        prompt = one.text.decode(one.engine.submitted[0].prompt_ids)
        assert '"name": "get_weather"' in prompt
        assert one.engine.submitted[0].constraint is None
        single = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, parallel_tool_calls=False)
        assert [call.function.name for call in single.choices[0].message.tool_calls or []] == ["get_weather"]


async def test_calls_stream(qwen: Path) -> None:
    """Each in one piece when it is complete; no part of a tag is ever content."""
    async with saying(qwen, f"Let me see.\n{PARIS}\n{NOW}") as (_, client):
        chunks = [chunk async for chunk in await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in calls if call.function] == [(0, "get_weather"), (1, "now")]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_without_calls_an_answer_is_as_ever(qwen: Path) -> None:
    """Also one that holds something like a tag, and one whose call is broken; tool_choice none tells of no tools."""
    for said in ("It rains < a lot <tool", f"a {PARIS[:-20]}", "<tool_call>{no json}</tool_call> done"):
        async with saying(qwen, said) as (one, client):
            answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
            assert answer.choices[0].message.content == said
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].finish_reason == "stop"
            none = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none")
            assert none.choices[0].message.content == said
            assert "get_weather" not in one.text.decode(one.engine.submitted[1].prompt_ids)


async def test_a_demanded_call_is_a_grammar(qwen: Path) -> None:
    """Nothing but a call of the named tool, or of any, can be said; its arguments follow their schema."""
    async with saying(qwen, PARIS) as (one, client):
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        for choice, allowed in ((named, [PARIS]), ("required", [PARIS, NOW, f"{PARIS}\n{NOW}"])):
            await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice)
            for said in (PARIS, NOW, f"{PARIS}\n{NOW}", "Let me see.", PARIS.replace("city", "town")):
                constraint = one.text.grammars().constraint(_grammar_of(one, choice))
                ids = one.text.encode(said, add_special_tokens=False, most_tokens=1000)
                takes = all(_take(constraint, token_id) for token_id in ids) and constraint.allowed()[next(iter(one.text.end_token_ids))]
                assert bool(takes) == (said in allowed), (choice, said)
            assert one.engine.submitted[-1].constraint is not None


async def test_beside_tools_a_form_leaves_the_choice_to_call(qwen: Path) -> None:
    """With `response_format` and tools that may be called, the answer is of that form, or calls and nothing else."""
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    allowed = ['{"rain": true}', PARIS, f"{PARIS}\n{NOW}", PARIS.replace("city", "town")]
    forbidden = ["Let me see.", '{"rain": 1}', PARIS.replace("get_weather", "elsewhere"), f'{{"rain": true}}{PARIS}']
    async with saying(qwen, PARIS) as (one, client):
        for said in (*allowed, *forbidden):
            answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, extra_body={"response_format": form})
            assert answer.choices[0].message.tool_calls
            constraint = one.engine.submitted[-1].constraint
            ids = one.text.encode(said, add_special_tokens=False, most_tokens=1000)
            takes = all(_take(constraint, token_id) for token_id in ids)
            ends = takes and (constraint.complete or constraint.allowed()[next(iter(one.text.end_token_ids))])  # type: ignore[union-attr]
            assert bool(ends) == (said in allowed), said


def _grammar_of(one: Served, choice: Any) -> str:
    tools = read_tools(Fields({"tools": TOOLS, "tool_choice": choice}), LoadedModel(one.engine, one.text))
    return forced_calls(tools, one.text, one.text.grammars())


def _take(constraint: Any, token_id: int) -> bool:
    if not constraint.allowed()[token_id]:
        return False
    constraint.take(token_id)
    return True


async def test_a_conversation_with_calls_and_their_results_is_rendered(qwen: Path) -> None:
    """An assistant's calls without content, a tool's answer: as templates take them, arguments as objects."""
    messages: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    async with saying(qwen, "It rains.") as (one, client):
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It rains."
        prompt = one.text.decode(one.engine.submitted[0].prompt_ids)
        assert '<tool_call>{"city": "Paris"}</tool_call>' in prompt
        messages[1]["tool_calls"][0]["function"]["arguments"] = ""  # as they are where max_tokens came first
        await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert "<tool_call>{}</tool_call>" in one.text.decode(one.engine.submitted[1].prompt_ids)
        assert "tool\nrain" in prompt


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"type": "function"}]}, "is no name"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "is no name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "must be a JSON schema"),
        ({"tools": TOOLS * 65}, "130 entries; at most 128"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "get_weather, now"),
        ({"tools": TOOLS, "tool_choice": "often"}, "none of none, auto, required"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice demands a call"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}], "tool_choice": "required"},
            "tools cannot be followed",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "is no JSON"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [5]}]}, "a function with a name"),
    ],
)
async def test_what_is_wrong_with_tools_is_said(body: dict[str, Any], words: str, qwen: Path) -> None:
    """And nothing reaches the engine."""
    async with saying(qwen, "x") as (one, _):
        answer = await one.post("/v1/chat/completions", {"messages": HELLO, **body})
        assert answer.status == 400
        assert words in answer.error["message"]
        assert one.engine.submitted == []


@settings(deadline=None)
@given(st.data())
def test_calls_are_read_however_the_text_is_cut(data: st.DataObject) -> None:
    """The same content and calls, piece by piece as at once; white space around calls is none of the content."""
    parts = data.draw(st.lists(st.sampled_from(["a ", "b\n", "<", "<tool", PARIS, NOW, " é", "</tool_call>", "<tool_call>{}</tool_call>"])))
    text = "".join(parts)

    def read(pieces: list[str]) -> tuple[str, list[ToolCall]]:
        reader, said, calls = CallReader(), "", []
        for piece in [*(reader.feed(piece) for piece in pieces), reader.flush()]:
            said += piece[0]
            calls += piece[1]
        return said, calls

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])
    assert len(read([text])[1]) == sum(part in (PARIS, NOW) for part in parts)


def test_a_template_without_tools_is_known(tmp_path: Path) -> None:
    """By what it is made of."""
    template = ModelText(byte_level_folder(tmp_path, template=CHATML)).chat_template
    assert template is not None
    assert not template.calls_tools
