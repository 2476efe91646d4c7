"""Every family's way to write calls: told, read whole and streamed, demanded, and given back in the next turn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.api.calls import CallReader, ToolCall, reader_of
from appliance.engine.api.fields import Fields
from appliance.engine.api.forced_calls import forced_calls
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.tools import read_tools
from appliance.engine.dialect import Dialect, dialect_of
from appliance.engine.text import ModelText
from tests.fakes.model_folder import CHATML
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, served
from tests.fakes.tool_templates import FAMILIES, family_folder

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]
NAMES = ("get_weather", "now")
PARIS: Json = {"name": "get_weather", "arguments": {"city": 'Paris "🙂" {['}}
NOW: Json = {"name": "now", "arguments": {}}
DIALECTS = {
    "qwen": Dialect.HERMES,
    "llama": Dialect.LLAMA,
    "mistral-list": Dialect.MISTRAL_LIST,
    "mistral-named": Dialect.MISTRAL_NAMED,
    "mistral-numbered": Dialect.MISTRAL_NUMBERED,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: family_folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def called(*calls: Json) -> Json:
    """The assistant's message that makes these calls."""
    numbered = enumerate(calls)
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{n}", "type": "function", "function": call} for n, call in numbered],
    }


def rendered_call(folder: Path, *calls: Json) -> str:
    """What the family's own template writes for an answer of these calls."""
    template = ModelText(folder).chat_template
    assert template is not None
    before = template.render(HELLO, {}, tools=TOOLS)
    said = template.render([*HELLO, called(*calls)], {}, tools=TOOLS, generation_prompt=False)
    at = len(before) if said.startswith(before) else said.index("[/INST]") + len("[/INST]")  # Mistral's tools move to the last question
    for end in ("<|im_end|>", "<|eot_id|>"):
        said = said.removesuffix("\n").removesuffix(end)
    return said[at:]


def read(reader: CallReader, pieces: Iterable[str]) -> tuple[str, list[ToolCall]]:
    """All that comes out of it."""
    told = [*(reader.feed(piece) for piece in pieces), reader.flush()]
    return "".join(text for text, _ in told), [call for _, calls in told for call in calls]


def objects(calls: Iterable[ToolCall]) -> list[Json]:
    """Calls as a conversation has them."""
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]


@contextlib.asynccontextmanager
async def saying(folder: Path, said: str) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    text = ModelText(folder)
    ids = (*text.encode(said, add_special_tokens=False, most_tokens=1000), *text.end_token_ids)
    async with served(ScriptedEngine(lambda _request: ids, context=4000), folder) as one:
        yield one, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_says_which_dialect_it_speaks(family: str) -> None:
    """From what it writes; no option names it."""
    assert dialect_of(FAMILIES[family][0]) is DIALECTS[family]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ tools }} <tool_call><function=f>",
        "{{ tools }} <tool_call>f<arg_key>",
        "{{ tools }} <tool_call> as in <tool_calls>[",
        "{{ tools | tojson }}",
        "{{ tools }} <TOOLCALL>",
    ],
)
def test_a_template_without_a_known_form_has_none(template: str) -> None:
    """Also one between known tags, such as those of Qwen3-Coder and GLM."""
    assert dialect_of(template) is None


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_a_template_writes_for_calls_is_read_as_those_calls(family: str, folders: dict[str, Path]) -> None:
    """Whole and streamed, through the model's own tokens: the marks are special tokens, which stand for nothing otherwise."""
    calls = [PARIS] if family == "llama" else [PARIS, NOW]
    async with saying(folders[family], rendered_call(folders[family], *calls)) as (one, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        found = [call.function for call in choice.message.tool_calls or []]
        assert [{"name": one.name, "arguments": json.loads(one.arguments)} for one in found] == calls
        chunks = [chunk async for chunk in await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == ""
        streamed = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in streamed if call.function] == [
            (n, call["name"]) for n, call in enumerate(calls)
        ]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert "get_weather" in one.text.decode(one.engine.submitted[0].prompt_ids)


@pytest.mark.parametrize("family", FAMILIES)
async def test_without_tools_no_mark_is_ever_text(family: str, folders: dict[str, Path]) -> None:
    """A model that calls what nobody offered is not helped to say so: special tokens are nothing, as ever."""
    said = rendered_call(folders[family], PARIS)
    async with saying(folders[family], said) as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
    wanted = said
    for mark in FAMILIES[family][1]:
        wanted = wanted.replace(mark, "")
    assert answer.choices[0].message.content == wanted
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_next_turn_is_rendered(family: str, folders: dict[str, Path]) -> None:
    """With the calls that were read and their results; ids of whatever making, which Mistral's templates refuse, are made to fit."""
    calls = [PARIS] if family == "llama" else [PARIS, NOW]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"result {n}"} for n, _ in enumerate(calls)]
    messages: list[Any] = [*HELLO, called(*calls), *results]
    async with saying(folders[family], "It rains.") as (one, client):
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It rains."
        prompt = one.text.decode(one.engine.submitted[0].prompt_ids)
    assert all(f"result {n}" in prompt for n, _ in enumerate(calls))


async def test_llama_makes_one_call_at_a_time(folders: dict[str, Path]) -> None:
    """Its template refuses a conversation with two in one answer: so a second one is not let out."""
    two = '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}'
    async with saying(folders["llama"], two) as (one, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["now"]
        refused = await one.post("/v1/chat/completions", {"messages": [*HELLO, called(PARIS, NOW)], "tools": TOOLS})
    assert (refused.status, "single tool-calls" in refused.error["message"]) == (400, True)


LLAMA_SAYS = [
    ('{"name": "now", "parameters": {}}', "", [NOW]),
    ('\n {"name":"now","arguments":{}}\n', "", [NOW]),
    ('<|python_tag|>{"name": "elsewhere", "parameters": {"a": 1}}', "", [{"name": "elsewhere", "arguments": {"a": 1}}]),
    ('Let me see. <|python_tag|>{"name": "now", "parameters": {}}', "Let me see.", [NOW]),
    ('{"type": "function", "function": "now", "parameters": {}}', "", [NOW]),
    ('{"type": "function", "name": "now", "parameters": {}}; {"name": "now", "parameters": {}} ;\n', "", [NOW, NOW]),
    ('{"name": "now", "parameters": {}} and that is all', " and that is all", [NOW]),
    ('{"name": "elsewhere", "parameters": {}}', '{"name": "elsewhere", "parameters": {}}', []),
    ('{"name": "now"}', '{"name": "now"}', []),
    ('{"answer": {"name": "now", "parameters": {}}}', '{"answer": {"name": "now", "parameters": {}}}', []),
    ('See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}', []),
    ('<|python_tag|>print("{}")', '<|python_tag|>print("{}")', []),
    ('{"name": "now", "parameters": {', '{"name": "now", "parameters": {', []),
    ("{} {", "{} {", []),
    ("a; b ", "a; b ", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), LLAMA_SAYS)
def test_what_llama_says(text: str, said: str, calls: list[Json]) -> None:
    """Bare JSON is a call where an answer begins, or behind another, and only with a tool's name and arguments."""
    found = read(reader_of(Dialect.LLAMA, True, NAMES), [text])
    assert (found[0], objects(found[1])) == (said, calls)


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    """Its first key tells that it is no call."""
    reader = reader_of(Dialect.LLAMA, True, NAMES)
    assert reader.feed('{"na') == ("", [])
    assert reader.feed('tion": "x') == ('{"nation": "x', [])


MISTRAL_SAYS = [
    ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", [NOW]),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "now"}]', "", [NOW, NOW]),
    ('[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [NOW]),
    ("Well.\n[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", "Well.", [NOW, NOW]),
    ("[TOOL_CALLS]now{}", "", [NOW]),
    ("[TOOL_CALLS] now [ARGS] {}\n", "", [NOW]),
    ("[TOOL_CALLS]now[ARGS][1]", "[TOOL_CALLS]now[ARGS][1]", []),
    ("a [TOOL_CALLS] no call here { }", "a [TOOL_CALLS] no call here { }", []),
    ('[TOOL_CALLS][{"name": "now"}, 5]', '[TOOL_CALLS][{"name": "now"}, 5]', []),
    ("[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
    ("[TOOL_CALLS]no one[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]no one", [NOW]),
    ('[TOOL_CALLS]now[ARGS]{"a"', '[TOOL_CALLS]now[ARGS]{"a"', []),
    ("[TOOL_CA", "[TOOL_CA", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), MISTRAL_SAYS)
def test_what_mistral_says(text: str, said: str, calls: list[Json]) -> None:
    """The old form and the new ones, whichever the template shows; what is none of them stays text, its mark included."""
    found = read(reader_of(Dialect.MISTRAL_LIST, True, NAMES), [text])
    assert (found[0], objects(found[1])) == (said, calls)


def test_one_call_of_a_list_where_one_was_asked_for() -> None:
    """The others are dropped, and not counted."""
    reader = reader_of(Dialect.MISTRAL_LIST, False, NAMES)
    said, calls = read(reader, ['[TOOL_CALLS][{"name": "now"}, {"name": "now"}] and more'])
    assert (said, objects(calls), reader.calls) == ("", [NOW], 1)


PARTS = {
    Dialect.HERMES: ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', "<tool_call>", "</tool_call>"),
    Dialect.LLAMA: ('{"name": "now", "parameters": {"a": "}\\""}}', "<|python_tag|>", "; ", '{"name', '{"b": 1}', "{"),
    Dialect.MISTRAL_LIST: ('[TOOL_CALLS][{"name": "now"}]', "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]", "[ARGS]", "now", "{"),
}


@pytest.mark.parametrize("dialect", PARTS)
@settings(deadline=None)
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(dialect: Dialect, data: st.DataObject) -> None:
    """The same text and calls, piece by piece as at once: an answer that goes on over a crash is cut elsewhere."""
    text = "".join(data.draw(st.lists(st.sampled_from([*PARTS[dialect], " ", "\n", "é", "x"]), max_size=12)))
    parallel = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut, whole = (reader_of(dialect, parallel, NAMES) for _ in range(2))
    assert read(cut, pieces) == read(whole, [text])
    assert cut.calls == whole.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demanded_call_is_a_grammar_in_the_familys_own_tokens(family: str, folders: dict[str, Path]) -> None:
    """What the template writes for a call can be said, and ends the answer; another tool, other arguments or plain text cannot."""
    folder = folders[family]
    text = ModelText(folder)
    model = LoadedModel(ScriptedEngine(), text)
    spelled = {name: said_call(family, folder, call) for name, call in (("paris", PARIS), ("now", NOW))}
    spelled |= {"town": spelled["paris"].replace("city", "town"), "text": "Let me see."}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, allowed in ((named, {"paris"}), ("required", {"paris", "now"})):
        tools = read_tools(Fields({"tools": TOOLS, "tool_choice": choice}), model)
        grammar = forced_calls(tools, text, text.grammars())
        for name, said in spelled.items():
            assert says(text, grammar, said) == (name in allowed), (choice, said)


def said_call(family: str, folder: Path, call: Json) -> str:
    """A call as a model of the family says it."""
    said = rendered_call(folder, call).lstrip()
    return said.partition(', "id"')[0] + "}]" if family == "mistral-list" else said  # models say no id


@pytest.mark.parametrize("family", FAMILIES)
def test_references_within_a_tools_schema_are_followed(family: str, folders: dict[str, Path]) -> None:
    """What pydantic makes of nested models: each tool's definitions are its own, also where another has some of the same name."""
    folder, text = folders[family], ModelText(folders[family])
    parameters = {
        name: {"$defs": {"It": {"type": kind}}, "type": "object", "properties": {"it": {"$ref": "#/$defs/It"}}, "required": ["it"]}
        for name, kind in (("get_weather", "string"), ("now", "integer"))
    }
    offered = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in parameters.items()]
    tools = read_tools(Fields({"tools": offered, "tool_choice": "required"}), LoadedModel(ScriptedEngine(), text))
    grammar = forced_calls(tools, text, text.grammars())
    for name, it, allowed in (("get_weather", "x", True), ("get_weather", 5, False), ("now", 5, True), ("now", "x", False)):
        assert says(text, grammar, said_call(family, folder, {"name": name, "arguments": {"it": it}})) == allowed, (name, it)


def says(text: ModelText, grammar: str, said: str) -> bool:
    """Whether an answer under this grammar may be this text, and end there."""
    constraint = text.grammars().constraint(grammar)
    for token_id in text.encode(said, add_special_tokens=False, most_tokens=1000):
        if not constraint.allowed()[token_id]:
            return False
        constraint.take(token_id)
    return constraint.complete or bool(constraint.allowed()[next(iter(text.end_token_ids))])


def deep(levels: int) -> Json:
    """A schema with so many objects in each other."""
    schema: Json = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_no_model_can_be_told_is_refused_with_its_place(family: str, folders: dict[str, Path]) -> None:
    """Half a surrogate pair in a name or an id of a call, and a schema that is too deep to be followed: 400, and no defect of ours."""
    half, call = "\ud800", {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    use, result = {"type": "tool_use", "id": "a", "name": "now", "input": {}}, {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    chat: Json = {"model": "tiny", "max_tokens": 9, "tools": [{"type": "function", "function": {"name": "now"}}]}
    anthropic = {**chat, "tools": [{"name": "now"}]}
    told = {"role": "tool", "tool_call_id": "a", "content": "1"}

    def turns(assistant: Json, answer: Json) -> list[Json]:
        return [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "", **assistant}, answer]

    bad: list[tuple[str, Json, str]] = [
        ("/v1/chat/completions", {**chat, "messages": turns({"tool_calls": [{**call, "id": half}]}, told)}, "messages[1].tool_calls[0].id"),
        (
            "/v1/messages",
            {**anthropic, "messages": turns({"content": [{**use, "id": half}]}, {"role": "user", "content": [result]})},
            "messages[1].content[0].id",
        ),
        (
            "/v1/messages",
            {**anthropic, "messages": turns({"content": [{**use, "name": half}]}, {"role": "user", "content": [result]})},
            "messages[1].content[0].name",
        ),
        (
            "/v1/messages",
            {**anthropic, "messages": turns({"content": [use]}, {"role": "user", "content": [{**result, "tool_use_id": half}]})},
            "messages[2].content[0].tool_use_id",
        ),
    ]
    question = [{"role": "user", "content": "What time is it?"}]
    for levels in (100, 400):
        demanded = {"name": "now", "parameters": deep(levels)}
        body = {**chat, "messages": question, "tool_choice": "required", "tools": [{"type": "function", "function": demanded}]}
        bad.append(("/v1/chat/completions", body, "tools"))
    async with served(ScriptedEngine(lambda _request: (1,), context=60_000), folders[family]) as one:
        for path, body, param in bad:
            answer = await one.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert not one.engine.submitted
