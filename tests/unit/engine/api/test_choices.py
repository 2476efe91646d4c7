"""Several answers, log probabilities, and what sampling parameters the engine gets; to a plain client and to the openai package."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai

from appliance.engine.messages import GenerateRequest, SamplingParams
from appliance.engine.text import ModelText
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, served

HELLO = [{"role": "user", "content": "Hello"}]
SAID = ("The dog", "says 🙂 and", "“いろは”")


def each_its_own(text: ModelText) -> ScriptedEngine:
    """Answer i says SAID[i], by the seeds that follow each other; then the end."""

    def script(request: GenerateRequest) -> tuple[int, ...]:
        said = SAID[((request.sampling.seed or 0) - 7) % 3]
        return (*text.encode(said, add_special_tokens=False, most_tokens=100), *text.end_token_ids)

    return ScriptedEngine(script)


def client_of(one: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)


async def test_several_answers_are_choices_of_one(folder: Path) -> None:
    """Each a sequence with its own seed; the prompt counts once, the answers together."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        answer = await client_of(one).chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
        assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(SAID))
        assert [request.sampling.seed for request in one.engine.submitted] == [7, 8, 9]
        assert len({request.request_id for request in one.engine.submitted}) == 3
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one.engine.submitted[0].prompt_ids)
        lengths = [len(one.text.encode(said, add_special_tokens=False, most_tokens=100)) for said in SAID]
        assert answer.usage.completion_tokens == sum(lengths)
        completion = await client_of(one).completions.create(model="tiny", prompt="Hello", n=2, seed=7)
        assert [(choice.index, choice.text) for choice in completion.choices] == list(enumerate(SAID[:2]))


async def test_several_answers_stream_beside_each_other(folder: Path) -> None:
    """Every choice's pieces join to its text, each begins with its role and ends with its reason; one usage at the end."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        stream = await client_of(one).chat.completions.create(
            model="tiny", messages=HELLO, n=3, seed=7, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        for index, said in enumerate(SAID):
            mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
            assert mine[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in mine) == said
            assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].choices == []


async def test_several_prompts_are_answered_in_their_order(folder: Path) -> None:
    """A list of texts, as langchain's batches and evaluation harnesses send it: n choices a prompt; each prompt counts once."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        client, prompts = client_of(one), ["Hello", "Hello there"]
        answer = await client.completions.create(model="tiny", prompt=prompts, n=2, seed=7)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(SAID[:2] * 2))
        lengths = [len(request.prompt_ids) for request in one.engine.submitted[::2]]
        assert lengths[0] < lengths[1]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(lengths)
        twice = await client.completions.create(model="tiny", prompt=[[5, 6], [5, 6, 7]], n=2, seed=7)
        assert [request.prompt_ids for request in one.engine.submitted[4:]] == [(5, 6), (5, 6), (5, 6, 7), (5, 6, 7)]
        assert len(twice.choices) == 4
        assert twice.usage is not None
        assert twice.usage.prompt_tokens == 5
        pieces = [piece async for piece in await client.completions.create(model="tiny", prompt=prompts, n=2, seed=7, stream=True)]
        for index, said in enumerate(SAID[:2] * 2):
            assert "".join(piece.choices[0].text for piece in pieces if piece.choices[0].index == index) == said


async def test_several_answers_end_together_when_one_fails_or_the_client_goes(folder: Path) -> None:
    """An error instead of half an answer; nobody computes for a client that is gone."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        one.engine.fail_after, one.engine.step_s = 2, 0.02
        answer = await one.post("/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 7})
        assert (answer.status, answer.error["code"]) == (503, "generation_failed")
        streamed = await one.post("/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 7, "stream": True})
        # On a busy machine all of it may have happened before the first byte.
        told = streamed.error if streamed.status == 503 else streamed.events[-1]["error"]
        assert told["code"] == "generation_failed"
        deadline_s = time.monotonic() + 10
        while one.engine.running and time.monotonic() < deadline_s:  # the others were told to stop
            await asyncio.sleep(0.01)
        assert one.engine.running == 0
        one.engine.fail_after = None
        refused = await one.post("/v1/chat/completions", {"messages": HELLO, "n": 3, "max_tokens": 10**6})
        assert refused.status == 422


async def test_several_answers_carry_no_notes(folder: Path) -> None:
    """A gateway that asks for them gets the plain answer, and passes it on as it is."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        answer = await one.post("/v1/chat/completions", {"messages": HELLO, "n": 2, "seed": 7}, **{"x-appliance-resume": "0"})
        assert answer.headers["content-type"] == "application/json"
        assert [choice["message"]["content"] for choice in answer.json["choices"]] == list(SAID[:2])


def check_chat_entry(entry: Any, index: int, top: int) -> bytes:
    """As the scripted engine gives them."""
    assert entry.logprob == -0.25 * (index + 1)
    assert len(entry.top_logprobs) == top
    if top:
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    return bytes(entry.bytes)


async def test_logprobs_of_a_chat_whole_and_streamed(folder: Path) -> None:
    """An entry a token, whose bytes join to the text, also where a token is half a character."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        arguments: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 8, "logprobs": True}
        for top in (0, 3):
            answer = await client_of(one).chat.completions.create(**arguments, top_logprobs=top)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            raw = b"".join(check_chat_entry(entry, index, top) for index, entry in enumerate(logprobs.content))
            assert raw.decode() == answer.choices[0].message.content == SAID[1]
        stream = await client_of(one).chat.completions.create(**arguments, top_logprobs=2, stream=True)
        entries = [
            entry
            async for chunk in stream
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or []
        ]
        assert b"".join(check_chat_entry(entry, index, 2) for index, entry in enumerate(entries)).decode() == SAID[1]
        plain = await client_of(one).chat.completions.create(model="tiny", messages=HELLO, seed=8)
        assert plain.choices[0].logprobs is None


async def test_logprobs_of_a_completion(folder: Path) -> None:
    """Four lists; offsets are places in the text."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        answer = await client_of(one).completions.create(model="tiny", prompt="Hello", seed=7, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == answer.choices[0].text == SAID[0]
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
        assert logprobs.token_logprobs == [-0.25 * (index + 1) for index in range(len(logprobs.tokens))]
        assert logprobs.top_logprobs is not None
        assert all(len(top) == 2 for top in logprobs.top_logprobs)


async def test_an_answer_with_logprobs_is_chosen_once_more_after_a_crash(folder: Path) -> None:
    """What was noted are ids, not how likely they were: without a stream the whole answer is generated again, by the same seed."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        ids = one.text.encode(SAID[0], add_special_tokens=False, most_tokens=100)
        known = b'{"ticket":{"request_id":"chatcmpl-1","created_s":1,"seed":7},"ids":[%d,%d]}' % ids[:2]
        body = known + b'{"messages":[{"role":"user","content":"Hello"}],"logprobs":true}'
        answer = await one.post("/v1/chat/completions", body, **{"x-appliance-resume": str(len(known))})
        assert one.engine.submitted[-1].answer_ids == ()
        choice = json.loads(answer.body.decode().rpartition("data: ")[2])["choices"][0]
        assert choice["message"]["content"] == SAID[0]
        assert len(choice["logprobs"]["content"]) == len(ids)


async def test_sampling_parameters_reach_the_engine(folder: Path) -> None:
    """Under OpenAI's, vLLM's and SGLang's names."""
    async with served(each_its_own(ModelText(folder)), folder) as one:
        sent = {
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
            "min_p": 0.05,
            "min_tokens": 2,
            "logit_bias": {"5": -100, "6": 1.5},
        }
        await one.post("/v1/chat/completions", {"messages": HELLO, "seed": 7, **sent})
        sampling = one.engine.submitted[-1].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
        assert (sampling.min_p, sampling.min_new_tokens, sampling.logit_bias) == (0.05, 2, ((5, -100.0), (6, 1.5)))
        assert sampling.adjusts
        assert not SamplingParams(5).adjusts
        await one.post("/generate", {"text": "Hello", "sampling_params": {"min_new_tokens": 3, "regex": "[ab]+"}})
        assert one.engine.submitted[-1].sampling.min_new_tokens == 3
        assert one.engine.submitted[-1].constraint is not None
        await one.post("/v1/completions", {"prompt": "Hello", "n": 2, "response_format": {"type": "json_object"}})
        constraints = [request.constraint for request in one.engine.submitted[-2:]]
        assert None not in constraints
        assert constraints[0] is not constraints[1]
