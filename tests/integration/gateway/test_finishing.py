"""Engines that can finish a message that has begun (vLLM, SGLang): a sampled stream goes on over their death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.launch import ContinuesBy, EngineLimits
from tests.fakes.scripted_appliance import Answer, GatewayProcess, ScriptedAppliance, appliance

Json = dict[str, Any]
BY_MESSAGE = EngineLimits("m", 4096, 8, 65536, continues_by=ContinuesBy.MESSAGE)
CHAT: Json = {"do": "words", "events": 12, "gap_s": 0.03, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
TEXT: Json = {"do": "words", "events": 12, "gap_s": 0.03, "stream": True, "prompt": "say:"}


@contextlib.asynccontextmanager
async def finishing(run_dir: Path) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance]]:
    """The first life says a0 a1 ..."""
    async with appliance(run_dir, engine=False) as (running, scripted):
        await next_life(running, scripted, "a")
        yield running, scripted


async def next_life(running: GatewayProcess, scripted: ScriptedAppliance, says: str) -> None:
    """One that says another word."""
    await scripted.start_engine("--says", says, publish=False)
    scripted.serve(BY_MESSAGE)
    await running.until(lambda status: status["standing"] == "open", "open")


async def over_a_crash(run_dir: Path, body: Json, path: str, *lives: str) -> Answer:
    """Asked of the first life, which dies when some of it has come; and so do the next ones, but for the last."""
    async with finishing(run_dir) as (running, scripted), running.connection() as connection:
        connection.send("POST", path, body)
        status, headers = await connection.head()
        raw = b""
        for says in lives:
            word = b"%s%d" % (chr(ord(says) - 1).encode(), 3 * (ord(says) - ord("a")))
            while word not in raw:
                raw += await asyncio.wait_for(connection.chunk(), 20)
            await scripted.crash()
            await next_life(running, scripted, says)
        while part := await asyncio.wait_for(connection.chunk(), 20):
            raw += part
    return Answer(status, headers, raw, True)


def documents(answer: Answer) -> list[Json]:
    """Its events, which end as they should."""
    events = answer.events()
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(found: list[Json]) -> str:
    """All of it."""
    choices = [choice for one in found for choice in one["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("trailing", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_a_sampled_stream_goes_on_as_one_message(run_dir: Path, path: str, body: Json, trailing: bool) -> None:
    """Every word once, one id, one role, one finish reason, a usage that adds up; wherever the engine puts its spaces."""
    found = documents(await over_a_crash(run_dir, {**body, "trailing": trailing, "temperature": 0.9}, path, "b"))
    words = text_of(found).split(" ")
    assert [int(word[1:]) for word in words if word] == list(range(12))
    assert {word[0] for word in words if word} == {"a", "b"}
    assert words.count("") == int(trailing)
    assert {one["id"] for one in found} == {"a-1"}
    choices = [choice for one in found for choice in one["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert len([choice for choice in choices if "role" in choice.get("delta", {})]) == (path == "/v1/chat/completions")
    assert [one["usage"] for one in found if "usage" in one] == [{"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}]


async def test_over_two_crashes_and_with_a_limit(run_dir: Path) -> None:
    """What has been said counts against max_tokens."""
    found = documents(await over_a_crash(run_dir, {**CHAT, "max_tokens": 9}, "/v1/chat/completions", "b", "c"))
    words = text_of(found).split()
    assert [int(word[1:]) for word in words] == list(range(9))
    assert {word[0] for word in words} == {"a", "b", "c"}
    assert [choice["finish_reason"] for one in found for choice in one["choices"] if choice["finish_reason"]] == ["length"]
    assert found[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19}


async def test_a_form_does_not_go_on_from_its_middle(run_dir: Path) -> None:
    """With tools or a grammar the stream ends in an error that says so."""
    answer = await over_a_crash(run_dir, {**CHAT, "tools": [{"type": "function"}]}, "/v1/chat/completions", "b")
    error = json.loads(answer.events()[-1])["error"]
    assert error["code"] == "engine_lost"
    assert "[DONE]" not in answer.events()


MESSAGE: Json = {"max_tokens": 100, "stream": True, "temperature": 0.9, "system": [{"type": "text", "text": "Count."}]}


def message(**orders: Any) -> Json:
    """One of Anthropic's, whose text is what the engine is to do."""
    return {**MESSAGE, "messages": [{"role": "user", "content": json.dumps({"do": "words", "events": 12, "gap_s": 0.03, **orders})}]}


def named(answer: Answer) -> list[tuple[str, Json]]:
    """Its events."""
    blocks = [block for block in answer.body.decode().split("\n\n") if block.startswith("event: ")]
    return [(block.splitlines()[0][7:], json.loads(block.splitlines()[1][6:])) for block in blocks]


@pytest.mark.parametrize("most", [100, 9])
async def test_a_message_of_anthropic_s_goes_on_through_chat_completions(run_dir: Path, most: int) -> None:
    """Over two deaths: one start, one block, every word once, one reason, a usage that adds up, one end."""
    found = named(await over_a_crash(run_dir, {**message(), "max_tokens": most}, "/v1/messages", "b", "c"))
    words = "".join(event["delta"]["text"] for name, event in found if name == "content_block_delta").split()
    assert [int(word[1:]) for word in words] == list(range(min(12, most)))
    assert {word[0] for word in words} == {"a", "b", "c"}
    others = [name for name, _ in found if name != "content_block_delta"]
    assert others == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    (delta,) = [event for name, event in found if name == "message_delta"]
    assert delta["delta"]["stop_reason"] == ("end_turn" if most == 100 else "max_tokens")
    assert delta["usage"] == {"input_tokens": 10, "output_tokens": min(12, most)}
    assert {event["index"] for name, event in found if name.startswith("content_block")} == {0}


@pytest.mark.parametrize("place", ["words", "reason"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_an_engine_that_dies_behind_the_last_word_costs_no_word(run_dir: Path, path: str, place: str) -> None:
    """All that may be said is said, and only its end is missing: nothing is added to it, and it ends once."""
    orders = {"max_tokens": 5, "die_after": place}
    body = {**message(**orders), "max_tokens": 5} if path == "/v1/messages" else {**(TEXT if path == "/v1/completions" else CHAT), **orders}
    async with finishing(run_dir) as (running, scripted):
        asked = asyncio.ensure_future(running.post(body, path))
        await running.until(lambda status: status["standing"] == "hold", "it has died")
        await next_life(running, scripted, "b")
        answer = await asked
    if path == "/v1/messages":
        found = named(answer)
        words = "".join(event["delta"]["text"] for name, event in found if name == "content_block_delta").split()
        assert [name for name, _ in found][-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert found[-2][1]["usage"] == {"input_tokens": 10, "output_tokens": 5}
        assert found[-2][1]["delta"]["stop_reason"] == "max_tokens"
    else:
        found_documents = documents(answer)
        words = text_of(found_documents).split()
        reasons = [choice["finish_reason"] for one in found_documents for choice in one["choices"] if choice["finish_reason"]]
        assert reasons == ["length"]
        assert found_documents[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert words == [f"a{number}" for number in range(5)]


@pytest.mark.parametrize("most", [100, 9])
async def test_sglang_s_generate_goes_on_with_all_so_far_in_each_event(run_dir: Path, most: int) -> None:
    """Over two deaths: each text begins with the one before, the ids and the counts add up, one reason at the end."""
    asked = {"do": "words", "events": 12, "gap_s": 0.03, "stream": True, "text": "say:", "sampling_params": {"max_new_tokens": most}}
    found = documents(await over_a_crash(run_dir, asked, "/generate", "b", "c"))
    count = min(12, most)
    assert [len(one["output_ids"]) for one in found] == list(range(1, count + 1))
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(found))
    assert [int(word[1:]) for word in found[-1]["text"].split()] == found[-1]["output_ids"] == list(range(count))
    about = found[-1]["meta_info"]
    assert (about["id"], about["prompt_tokens"], about["completion_tokens"]) == ("a", 10, count)
    assert [one["meta_info"]["finish_reason"] for one in found if one["meta_info"]["finish_reason"]] == [
        {"type": "stop" if most == 100 else "length"}
    ]
