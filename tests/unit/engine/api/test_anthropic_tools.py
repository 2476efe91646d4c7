"""Tools in /v1/messages: told, called whole and streamed, demanded, their results given back; and nothing said twice over a crash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.text import ModelText
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, request_bytes, served
from tests.fakes.tool_templates import family_folder

Json = dict[str, Any]
PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS: list[Json] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
HELLO: list[Json] = [{"role": "user", "content": "Weather in Paris?"}]
BODY: Json = {"model": "tiny", "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("qwen"), "qwen")


@contextlib.asynccontextmanager
async def saying(folder: Path, said: str) -> AsyncIterator[Served]:
    text = ModelText(folder)
    ids = (*text.encode(said, add_special_tokens=False, most_tokens=1000), *text.end_token_ids)
    async with served(ScriptedEngine(lambda _request: ids, context=4000), folder) as one:
        yield one


def message_of(events: list[Json]) -> Json:
    """What a client puts together of a stream, by the rules of the protocol: one block at a time, in order, each begun and ended."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, blocks = dict(events[0]["message"]), []
    open_index = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, len(blocks))
            open_index = event["index"]
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert (event["type"], event["index"]) == ("content_block_delta", open_index)
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta"
                blocks[-1]["json"] += delta["partial_json"]
    assert open_index is None
    for block in blocks:
        raw = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(raw)
    return message | {"content": blocks} | events[-2]["delta"]


SAID = [
    (f"Let me see.\n{PARIS}\n{NOW}", ["text", "tool_use", "tool_use"], "tool_use"),
    (PARIS, ["tool_use"], "tool_use"),
    ("It rains < a lot.", ["text"], "end_turn"),
    (f"{NOW} Done.", ["tool_use", "text"], "tool_use"),
    ("<tool_call>no call", ["text"], "end_turn"),
    ("", ["text"], "end_turn"),
]


@pytest.mark.parametrize(("said", "kinds", "reason"), SAID)
async def test_calls_are_blocks(said: str, kinds: list[str], reason: str, qwen: Path) -> None:
    """Beside the text, with an id of their own and the input as an object; a stream adds up to the same."""
    async with saying(qwen, said) as one:
        whole = (await one.post(PATH, BODY)).json
        streamed = message_of((await one.post(PATH, {**BODY, "stream": True})).events)
        assert "get_weather" in one.text.decode(one.engine.submitted[0].prompt_ids)
    assert whole["stop_reason"] == streamed["stop_reason"] == reason
    assert [block["type"] for block in streamed["content"]] == kinds
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert [(call["name"], call["input"]) for call in calls] == [
        (call["name"], call["input"]) for call in streamed["content"] if call["type"] == "tool_use"
    ]
    assert {"get_weather": {"city": "Paris 🙂"}, "now": {}}.items() >= {call["name"]: call["input"] for call in calls}.items()
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("toolu_") for call in calls)
    for kind in ("text",):
        assert "".join(b["text"] for b in whole["content"] if b["type"] == kind) == "".join(
            b["text"] for b in streamed["content"] if b["type"] == kind
        )


async def test_the_results_are_rendered(qwen: Path) -> None:
    """The assistant's calls as the template writes them, each result as the tool's, text beside them as the user's."""
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}, use("a", "get_weather", {"city": "Paris"}), use("b", "now", {})],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    async with saying(qwen, "It rains.") as one:
        answer = (await one.post(PATH, {**BODY, "messages": messages})).json
        prompt = one.text.decode(one.engine.submitted[0].prompt_ids)
        counted = await one.post(f"{PATH}/count_tokens", {"model": "tiny", "messages": messages, "tools": TOOLS})
        assert counted.json == {"input_tokens": len(one.engine.submitted[0].prompt_ids)}
    assert answer["content"] == [{"type": "text", "text": "It rains."}]
    assert 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>' in prompt
    for part in ("tool\nrain", "tool\nerror", "user\nWell?"):
        assert part in prompt


def use(call_id: str, name: str, given: Json) -> Json:
    """The block of a call."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


async def test_the_choice_of_tools(qwen: Path) -> None:
    """any and tool are a grammar; none tells the model of none; without parallel use the second call is not let out."""
    async with saying(qwen, f"{PARIS}\n{NOW}") as one:
        for choice, demanded, told in (
            ({"type": "any"}, True, True),
            ({"type": "tool", "name": "now"}, True, True),
            ({"type": "auto"}, False, True),
            ({"type": "none"}, False, False),
        ):
            await one.post(PATH, {**BODY, "tool_choice": choice})
            request = one.engine.submitted[-1]
            assert ((request.constraint is not None), ("get_weather" in one.text.decode(request.prompt_ids))) == (demanded, told), choice
        single = (await one.post(PATH, {**BODY, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})).json
    assert [block["name"] for block in single["content"]] == ["get_weather"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "is no name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema", "JSON schema"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type", "bash_20250124"),
        ({"tools": [5]}, "tools[0]", "an object"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name", "get_weather, now"),
        ({"tool_choice": {"type": "often"}}, "tool_choice.type", "auto, none, any, tool"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"messages": [{"role": "user", "content": [use("a", "f", {})]}]}, "messages[0].content[0]", "tool_use"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[1].content[0]",
            "input",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages[0].content[0]", "tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0]",
            "'image'",
        ),
    ],
)
async def test_what_is_wrong_with_tools_is_said(change: Json, param: str, words: str, qwen: Path) -> None:
    """Naming the field; and nothing reaches the engine."""
    async with saying(qwen, "x") as one:
        answer = await one.post(PATH, {**BODY, **change})
        assert one.engine.submitted == []
    assert answer.status == 400
    assert (answer.error["param"], words in answer.error["message"]) == (param, True), answer.error


async def chunks_of(one: Served, body: Json, known: bytes = b"") -> list[str]:
    """What the engine sends at once, piece by piece, to a gateway."""
    reader, writer = await one.connect()
    writer.write(request_bytes("POST", PATH, known + json.dumps(body).encode(), x_appliance_resume=str(len(known))))
    await reader.readuntil(b"\r\n\r\n")
    chunks: list[str] = []
    while size := int(await reader.readline(), 16):
        chunks.append((await reader.readexactly(size)).decode())
        await reader.readexactly(2)
    writer.close()
    return chunks


def known_after(chunks: list[str]) -> bytes:
    """What a gateway that has passed these on tells the next life; empty: it has passed on nothing."""
    lines = [line for chunk in chunks for line in chunk.split("\n") if line.startswith(":")]
    told = {name: [line.partition(" ")[2] for line in lines if line.startswith(name)] for name in (":ticket", ":ids", ":finish")}
    if not told[":ticket"]:
        return b""
    ids = [int(one) for part in told[":ids"] for one in part.split(",")]
    document = {"ticket": json.loads(told[":ticket"][0]), "ids": ids, "sent": True, "ended": lines.count(":end")}
    return json.dumps(document | {"finish": told[":finish"][0] if told[":finish"] else None}).encode()


def events_in(chunks: list[str]) -> list[Json]:
    """Without the notes."""
    return [json.loads(line.removeprefix("data: ")) for chunk in chunks for line in chunk.split("\n") if line.startswith("data: ")]


async def test_calls_are_not_made_twice_over_a_crash(qwen: Path) -> None:
    """Cut behind whatever was sent at once, the stream goes on exactly: every block once, with the same id."""
    body = {**BODY, "stream": True}
    async with saying(qwen, f"See: {PARIS}\n{NOW[:-12]}") as one:  # the last call has no closing tag: it is certain at the end only
        one.engine.step_s = 0.002
        plain = await chunks_of(one, body)
        wanted = message_of(events_in(plain))
        for cut in range(1, len(plain)):
            known = known_after(plain[:cut])
            if known:
                going_on = await chunks_of(one, body, known)
                found = message_of(events_in([*plain[:cut], *going_on]))
                assert found == wanted, f"cut behind {cut} of {len(plain)} chunks"
    assert [block["type"] for block in wanted["content"]] == ["text", "tool_use", "tool_use"]


async def test_the_anthropic_client(qwen: Path) -> None:
    """The unmodified client, where it is installed: whole, and its own putting together of a stream."""
    anthropic = pytest.importorskip("anthropic")
    async with saying(qwen, f"Let me see.\n{PARIS}") as one:
        client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{one.port}", api_key="none", max_retries=0)
        wanted: Json = {"model": "tiny", "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
        whole = await client.messages.create(**wanted)
        async with client.messages.stream(**wanted) as stream:
            streamed = await stream.get_final_message()
        assert (await client.messages.count_tokens(model="tiny", messages=HELLO, tools=TOOLS)).input_tokens == whole.usage.input_tokens
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["text", "tool_use"]
        assert (message.content[1].name, message.content[1].input, message.stop_reason) == ("get_weather", {"city": "Paris 🙂"}, "tool_use")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (r'{"city": "\ud83d"}', {"city": "�"}),
        (r'{"\udfff": 1}', {"�": 1}),
        (r'"{\"city\": \"\\ud83d\"}"', {"city": "�"}),
        (r'"{\"city\": NaN}"', {"raw": '{"city": NaN}'}),
        ('{"city": NaN}', None),
        ('{"city": -1e999}', None),
    ],
)
async def test_whatever_a_model_says_goes_out_as_json(qwen: Path, arguments: str, given: Json | None) -> None:
    """Half of an emoji is no text and is replaced, as broken UTF-8 is; what holds NaN or infinity is no call. No answer is lost of it."""
    said = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
    chat = {**BODY, "tools": [{"type": "function", "function": {"name": "now"}}]}
    async with saying(qwen, said) as one:
        whole = await one.post(PATH, BODY)
        streamed = await one.post(PATH, {**BODY, "stream": True})
        answers = [await one.post("/v1/chat/completions", {**chat, "stream": stream}) for stream in (False, True)]
    for content in (json.loads(whole.body, parse_constant=pytest.fail)["content"], message_of(streamed.events)["content"]):
        assert [block.get("input", block.get("text")) for block in content] == [said if given is None else given]
    assert answers[1].events[-1] == "[DONE]"
    calls = answers[0].json["choices"][0]["message"].get("tool_calls") or []
    assert len(calls) == (given is not None)
    if arguments.startswith("{"):
        assert [json.loads(call["function"]["arguments"]) for call in calls] == ([given] if given is not None else [])
