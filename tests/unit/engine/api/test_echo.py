"""Completions that repeat their prompt, and how likely its tokens were: what evaluation harnesses ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.engine.text import ModelText
from tests.fakes.scripted_engine import Script, ScriptedEngine
from tests.fakes.serve_scripted import Served, served

TEXT = "/v1/completions"
PROMPT = "The dog 🙂"
SAID = " says “いろは”"


def says(text: ModelText, said: str = SAID) -> Script:
    ids = text.encode(said, add_special_tokens=False, most_tokens=1000)
    return lambda _request: (*ids, *text.end_token_ids)


def ids_of(one: Served, text: str) -> list[int]:
    return list(one.text.encode(text, add_special_tokens=False, most_tokens=1000))


def client_of(one: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)


def merged(events: list[Any]) -> tuple[str, dict[str, list[Any]], str]:
    """Text, lists and reason of a stream's only choice."""
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    lists: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(values)
    return "".join(choice["text"] for choice in choices), lists, choices[-1]["finish_reason"]


@pytest.mark.parametrize("from_ids", [False, True])
async def test_the_text_begins_with_the_prompt(folder: Path, from_ids: bool) -> None:
    """Whole and streamed, of a text and of token ids; the engine is asked for no likelihoods."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        prompt: Any = ids_of(one, PROMPT) if from_ids else PROMPT
        whole = await client_of(one).completions.create(model="tiny", prompt=prompt, echo=True)
        assert whole.choices[0].text == PROMPT + SAID
        assert whole.choices[0].logprobs is None
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(ids_of(one, SAID))
        stream = await client_of(one).completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == PROMPT + SAID
        assert {request.sampling.prompt_logprobs for request in one.engine.submitted} == {None}


async def test_the_prompts_likelihoods_stand_before_the_answers(folder: Path) -> None:
    """Four lists over both; the first token has none; each offset is where its token's first character stands in the text."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        body = {"prompt": PROMPT, "echo": True, "logprobs": 2}
        choice = (await one.post(TEXT, body)).json["choices"][0]
        assert one.engine.submitted[0].sampling.prompt_logprobs == 2
        lists, prompt, answer = choice["logprobs"], ids_of(one, PROMPT), ids_of(one, SAID)
        of_prompt, of_answer = [None, *(-float(i) for i in range(1, len(prompt)))], [-0.25 * (i + 1) for i in range(len(answer))]
        assert lists["token_logprobs"] == of_prompt + of_answer
        assert lists["top_logprobs"][0] is None
        assert all(lists["token_logprobs"][i] in lists["top_logprobs"][i].values() for i in range(1, len(prompt) + len(answer)))
        for token_id, offset in zip([*prompt, *answer], lists["text_offset"], strict=True):
            raw = one.text.token(token_id)[1]
            assert raw in choice["text"][offset:].encode()[: len(raw) + 3], (token_id, offset)
        assert merged((await one.post(TEXT, {**body, "stream": True})).events) == (choice["text"], lists, "stop")


async def test_nothing_but_the_prompt_is_told_where_no_token_is_asked_for(folder: Path) -> None:
    """max_tokens=0 is for an echo alone: no token of the answer is told or counted. Without an echo it is refused as ever."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        body = {"prompt": [ids_of(one, PROMPT), [5]], "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
        answer = (await one.post(TEXT, body)).json
        assert [choice["text"] for choice in answer["choices"]] == [PROMPT, PROMPT, *[one.text.token(5)[0]] * 2]
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [len(ids_of(one, PROMPT))] * 2 + [1, 1]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] == 0
        streamed = {**body, "prompt": PROMPT, "n": 1, "stream": True, "stream_options": {"include_usage": True}}
        events = (await one.post(TEXT, streamed)).events
        text, lists, reason = merged(events)
        assert (text, len(lists["tokens"]), reason) == (PROMPT, len(ids_of(one, PROMPT)), "length")
        assert events[-2]["usage"]["completion_tokens"] == 0
        refused = await one.post(TEXT, {**body, "echo": False})
        assert (refused.status, refused.error["param"]) == (400, "max_tokens")


async def test_a_stop_string_in_the_prompt_stops_nothing(folder: Path) -> None:
    """It is looked for in what the model says."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        answer = await one.post(TEXT, {"prompt": PROMPT, "echo": True, "stop": "dog"})
        assert answer.json["choices"][0]["text"] == PROMPT + SAID


async def test_parts_of_characters_have_names_of_their_own(folder: Path) -> None:
    """As OpenAI writes them; the likeliest of several tokens with one name is the one that is told."""
    async with served(ScriptedEngine(says(ModelText(folder), "🚀")), folder) as one:
        lists = (await one.post(TEXT, {"prompt": "x", "logprobs": 3})).json["choices"][0]["logprobs"]
        raws = [one.text.token(token_id)[1] for token_id in ids_of(one, "🚀")]
        assert len(raws) > 1, "this tokenizer has the emoji whole: take another one"
        assert lists["tokens"] == ["bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) for raw in raws]
        assert set(lists["text_offset"]) == {0}


async def test_an_echoed_stream_goes_on_over_a_crash_without_saying_the_prompt_again(folder: Path) -> None:
    """What the client has, it has."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        plain = merged((await one.post(TEXT, {"prompt": PROMPT, "echo": True, "stream": True})).events)
        ids = ids_of(one, SAID)[:2]
        known = {"ticket": {"request_id": "cmpl-1", "created_s": 1, "seed": 7}, "ids": ids, "sent": True}
        document = json.dumps(known).encode()
        body = document + json.dumps({"prompt": PROMPT, "echo": True, "stream": True}).encode()
        answer = await one.post(TEXT, body, x_appliance_resume=str(len(document)))
        blocks = [block.partition("data: ")[2] for block in answer.body.decode().split("\n\n") if "data: " in block]
        rest = "".join(json.loads(data)["choices"][0]["text"] for data in blocks if data != "[DONE]")
        assert PROMPT + one.text.decode(ids) + rest == plain[0]


async def test_generate_tells_likelihoods_as_sglang_does(folder: Path) -> None:
    """`return_logprob`: of the answer, and with a start of the prompt; pairs of number and id, with texts where they are wanted."""
    async with served(ScriptedEngine(says(ModelText(folder))), folder) as one:
        prompt, answer = ids_of(one, PROMPT), ids_of(one, SAID)
        body: dict[str, Any] = {"text": PROMPT, "return_logprob": True}
        meta = (await one.post("/generate", body)).json["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.25 * (i + 1), token_id, None] for i, token_id in enumerate(answer)]
        assert "input_token_logprobs" not in meta
        assert "output_top_logprobs" not in meta
        body |= {"logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
        meta = (await one.post("/generate", body)).json["meta_info"]
        names = [one.text.token(token_id)[0] for token_id in prompt]
        expected = [[None if not i else -float(i), token_id, names[i]] for i, token_id in enumerate(prompt)]
        assert meta["input_token_logprobs"] == expected
        assert meta["input_top_logprobs"][0] is None
        assert [len(top) for top in meta["output_top_logprobs"]] == [2] * len(answer)
        events = (await one.post("/generate", {**body, "stream": True})).events
        assert {name: events[-2]["meta_info"][name] for name in meta if "logprobs" in name} == {
            name: value for name, value in meta.items() if "logprobs" in name
        }
        later = (await one.post("/generate", {**body, "logprob_start_len": 2})).json["meta_info"]
        assert later["input_token_logprobs"] == expected[2:]


async def test_a_prompt_in_a_list_has_the_answer_that_it_has_alone(folder: Path) -> None:
    """With a seed of the client's: its answers have the same seeds in whatever company; without one, none is like another."""
    async with served(ScriptedEngine(), folder) as one:

        async def seeds(**body: Any) -> list[int | None]:
            before = len(one.engine.submitted)
            assert (await one.post(TEXT, {"max_tokens": 1, **body})).status == 200
            return [request.sampling.seed for request in one.engine.submitted[before:]]

        assert await seeds(prompt="x", n=2, seed=7) == [7, 8]
        assert await seeds(prompt=["a", "x", "b"], n=2, seed=7) == [7, 8] * 3
        assert len(set(await seeds(prompt=["a", "a", "a"]))) == 3
