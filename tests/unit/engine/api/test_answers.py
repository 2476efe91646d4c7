"""What answers look like, to a plain HTTP client and to the openai package."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest

from appliance.engine.api.app import PATHS
from appliance.engine.messages import GenerateRequest
from appliance.engine.text import ModelText
from tests.fakes.model_folder import byte_fallback_folder, byte_level_folder
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, served

HELLO = [{"role": "user", "content": "Hello"}]
SAID = "The dog says 🙂 and “いろは” e\u0301."


def says(text: ModelText, said: str) -> Callable[[GenerateRequest], tuple[int, ...]]:
    """A script: this text, then the model's end token."""
    ids = text.encode(said, add_special_tokens=False, most_tokens=1000)
    return lambda _request: (*ids, *text.end_token_ids)


@contextlib.asynccontextmanager
async def saying(folder: Path, said: str = SAID) -> AsyncIterator[Served]:
    async with served(ScriptedEngine(says(ModelText(folder), said)), folder) as one:
        yield one


def client_of(one: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)


async def test_openai_client_chat(folder: Path) -> None:
    """The unmodified openai client: the whole text, the reason, and counts that add up."""
    async with saying(folder) as one:
        answer = await client_of(one).chat.completions.create(model="tiny", messages=HELLO)
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one.engine.submitted[0].prompt_ids)
        assert answer.usage.completion_tokens == len(one.text.encode(SAID, add_special_tokens=False, most_tokens=1000))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_openai_client_chat_stream(folder: Path) -> None:
    """Streamed: the role first, then text that joins to the whole, the reason, the usage last and only when asked for."""
    async with saying(folder) as one:
        stream = await client_of(one).chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SAID
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert {chunk.usage for chunk in chunks[:-1]} == {None}
        assert len({chunk.id for chunk in chunks}) == 1
        plain = [chunk async for chunk in await client_of(one).chat.completions.create(model="tiny", messages=HELLO, stream=True)]
        assert all(chunk.choices and chunk.usage is None for chunk in plain)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_counts_as_it_goes(folder: Path, path: str) -> None:
    """vLLM's `continuous_usage_stats`, which guidellm sends: each chunk has the counts so far, and the last one those of a whole answer."""
    async with saying(folder) as one:
        asked = {"messages": HELLO} if path.startswith("/v1/chat") else {"prompt": "quick brown"}
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await one.post(path, {**asked, "stream": True, "stream_options": options})).events
        assert events.pop() == "[DONE]"
        whole = (await one.post(path, asked)).json["usage"]
        alone = (await one.post(path, {**asked, "stream": True, "stream_options": {"continuous_usage_stats": True}})).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert all(one["usage"]["prompt_tokens"] == whole["prompt_tokens"] for one in events)
    assert all(one["usage"]["total_tokens"] == one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"] for one in events)
    assert {name: events[-1]["usage"][name] for name in ("completion_tokens", "total_tokens")} == {
        name: whole[name] for name in ("completion_tokens", "total_tokens")
    }
    assert all("usage" not in event for event in alone[:-1])


async def test_openai_client_completions(folder: Path) -> None:
    """Completions whole and streamed, from a text and from token ids."""
    async with saying(folder) as one:
        client = client_of(one)
        whole = await client.completions.create(model="tiny", prompt="quick brown")
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (SAID, "stop")
        stream = await client.completions.create(model="tiny", prompt=[5, 6, 7], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == SAID
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == 3
        assert one.engine.submitted[1].prompt_ids == (5, 6, 7)


async def test_openai_client_sees_models_and_typed_errors(folder: Path) -> None:
    """models.list and models.retrieve work; an unknown model raises the client's NotFoundError with OpenAI's code."""
    async with saying(folder) as one:
        client = client_of(one)
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="gpt-5", messages=HELLO)
        assert refused.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")


async def test_stream_on_the_wire(folder: Path) -> None:
    """The bytes of a stream: SSE headers, `data:` events, [DONE] at the end."""
    async with saying(folder, "a\u2028b") as one:
        answer = await one.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.events[-1] == "[DONE]"
        assert [event["object"] for event in answer.events[:-1]] == ["chat.completion.chunk"] * (len(answer.events) - 1)
        # Clients that split by str.splitlines() must not see a line break inside an event.
        assert all(line.startswith("data: ") for line in answer.body.decode().splitlines() if line)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]) == "a\u2028b"


async def test_generate_takes_text_or_ids_and_gives_both(folder: Path) -> None:
    """SGLang's /generate: text and output_ids, meta_info, and a stream whose events carry all so far."""
    async with saying(folder) as one:
        ids = list(one.text.encode(SAID, add_special_tokens=False, most_tokens=1000))
        answer = (await one.post("/generate", {"input_ids": [3, 4], "rid": "mine"})).json
        assert (answer["text"], answer["output_ids"]) == (SAID, ids)
        meta = answer["meta_info"]
        assert (meta["id"], meta["finish_reason"], meta["prompt_tokens"], meta["completion_tokens"]) == (
            "mine",
            {"type": "stop"},
            2,
            len(ids),
        )
        body = {"text": "quick", "sampling_params": {"max_new_tokens": 5}, "stream": True}
        events = (await one.post("/generate", body)).events
        assert events[-1] == "[DONE]"
        last = events[-2]
        assert last["output_ids"] == ids[:5]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
        assert all(last["text"].startswith(event["text"]) for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_before_itself(folder: Path, stream: bool) -> None:
    """A stop string that spans tokens: nothing of it is sent, the sequence is aborted at the match, counts include the match."""
    async with saying(folder, "one two three four") as one:
        one.engine.step_s = 0.01
        body = {"prompt": "x", "stop": ["o thr", "zzz"], "stream": stream, "stream_options": {"include_usage": True} if stream else None}
        answer = await one.post("/v1/completions", body)
        if stream:
            text = "".join(event["choices"][0]["text"] for event in answer.events[:-1] if event["choices"])
            reason, used = answer.events[-3]["choices"][0]["finish_reason"], answer.events[-2]["usage"]
        else:
            text, reason, used = answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"], answer.json["usage"]
        assert (text, reason) == ("one tw", "stop")
        assert one.engine.aborted == [one.engine.submitted[0].request_id]
        ids = one.text.encode("one two three four", add_special_tokens=False, most_tokens=100)
        needed = next(n for n in range(len(ids)) if "o thr" in one.text.decode(ids[:n]))
        assert used["completion_tokens"] == needed


async def test_almost_a_stop_string_is_given_out_at_the_end(folder: Path) -> None:
    """Text held back as a possible stop string is part of the answer when the answer ends without it."""
    async with saying(folder, "one two thr") as one:
        for stream in (False, True):
            answer = await one.post("/v1/completions", {"prompt": "x", "stop": "three", "stream": stream})
            texts = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
            assert "".join(choice["text"] for choice in texts) == "one two thr"


async def test_length_stop_ids_and_ignore_eos(folder: Path) -> None:
    """max_tokens ends with `length`, a client's stop token with `stop`; ignore_eos lets the end token pass, unseen in the text."""
    async with saying(folder, "one two three") as one:
        ids = one.text.encode("one two three", add_special_tokens=False, most_tokens=100)
        by_length = (await one.post("/v1/completions", {"prompt": "x", "max_tokens": 2})).json
        assert by_length["choices"][0]["finish_reason"] == "length"
        assert by_length["usage"]["completion_tokens"] == 2
        by_id = (await one.post("/v1/completions", {"prompt": "x", "stop_token_ids": [ids[2]]})).json
        assert by_id["choices"][0]["text"] == one.text.decode(ids[:2])
        assert by_id["choices"][0]["finish_reason"] == "stop"
        ignored = (await one.post("/v1/completions", {"prompt": "x", "ignore_eos": True})).json
        assert ignored["choices"][0]["text"] == "one two three"
        assert ignored["usage"]["completion_tokens"] == len(ids) + len(one.text.end_token_ids)


async def test_special_tokens_are_text_for_who_wants_them(folder: Path) -> None:
    """`skip_special_tokens` false: of all endpoints; stop strings find them too."""
    said = "one<|im_start|>two<|endoftext|>"
    async with saying(folder, said) as one:
        for path, asked in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
            choice = (await one.post(path, {**asked, "skip_special_tokens": False})).json["choices"][0]
            assert (choice.get("text") or choice["message"]["content"]) == said
        assert (await one.post("/v1/completions", {"prompt": "x"})).json["choices"][0]["text"] == "onetwo"
        body = {"text": "x", "sampling_params": {"skip_special_tokens": False, "stop": "<|endof"}}
        assert (await one.post("/generate", body)).json["text"] == "one<|im_start|>two"


async def test_default_answer_length_is_what_the_context_leaves(folder: Path) -> None:
    """Without max_tokens the answer may fill the context, and the prompt may take all of it but one token."""
    async with served(ScriptedEngine(context=64), folder) as one:
        for count, room in ((10, 54), (63, 1)):
            answer = (await one.post("/v1/completions", {"prompt": [5] * count, "ignore_eos": True})).json
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (room, "length")


async def test_sampling_parameters_reach_the_engine(folder: Path) -> None:
    """Each parameter arrives as it was sent; the model's end tokens join the client's stop tokens."""
    async with served(ScriptedEngine(), folder) as one:
        body = {"prompt": "x", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": -1, "stop_token_ids": [11]}
        assert (await one.post("/v1/completions", body)).status == 200
        sampling = one.engine.submitted[0].sampling
        assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 0.5, 0.9, 40)
        assert sampling.seed == 2**63 - 1
        assert sampling.stop_token_ids == one.text.end_token_ids | {11}
        await one.post("/generate", {"text": "x", "sampling_params": {"top_k": -1, "ignore_eos": True, "max_new_tokens": 1}})
        sampling = one.engine.submitted[1].sampling
        assert (sampling.top_k, sampling.stop_token_ids) == (0, frozenset())
        assert sampling.seed is not None  # drawn here, so that the gateway can be told


async def test_concurrent_requests_do_not_mix(folder: Path) -> None:
    """Sixteen streams at once: each gets its own tokens, whole."""
    async with served(ScriptedEngine(step_s=0.001), folder) as one:
        bodies = [
            {"input_ids": [40 + index, 41 + index], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}} for index in range(16)
        ]
        answers = await asyncio.gather(*(one.post("/generate", {**body, "stream": True}) for body in bodies))
        for index, answer in enumerate(answers):
            assert answer.events[-2]["output_ids"] == [40 + index, 41 + index] * 10


async def test_engine_failure_before_and_after_the_first_byte(folder: Path) -> None:
    """Before: 503 with the engine's sentence. After: an error event, and no [DONE] that would call it complete."""
    async with served(ScriptedEngine(), folder) as one:
        one.engine.fail_after = 0
        for stream in (False, True):
            answer = await one.post("/v1/completions", {"prompt": "x", "stream": stream})
            assert (answer.status, answer.error["code"]) == (503, "generation_failed")
            assert "1 GiB" in answer.error["message"]
            assert answer.headers["retry-after"] == "1"
        one.engine.fail_after, one.engine.step_s = 3, 0.02  # so that a token is out before the failure
        answer = await one.post("/v1/completions", {"prompt": "x", "stream": True})
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "generation_failed"
        assert "[DONE]" not in answer.events
        stream = await client_of(one).completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="1 GiB"):
            [chunk async for chunk in stream]


async def test_what_the_request_made_impossible_is_not_to_be_tried_again(folder: Path) -> None:
    """A grammar that becomes too much in the middle of an answer: 400, also as an event, in a list of answers and for a gateway."""
    async with served(ScriptedEngine(), folder) as one:
        one.engine.fail_after, one.engine.hopeless, one.engine.step_s = 2, True, 0.02
        for body in ({"prompt": "x"}, {"prompt": "x", "n": 2}):
            answer = await one.post("/v1/completions", body)
            assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
            assert "retry-after" not in answer.headers
        streamed = await one.post("/v1/completions", {"prompt": "x", "stream": True})
        told = streamed.error if streamed.status == 400 else streamed.events[-1]["error"]
        assert told["type"] == "invalid_request_error"
        noted = await one.post("/v1/completions", {"prompt": "x"}, x_appliance_resume="0")
        assert noted.status == 400 or b":whole 400\n" in noted.body


async def test_health_models_and_metrics(folder: Path) -> None:
    """/health has progress, load and limits; /metrics counts what happened, in Prometheus' format."""
    async with served(ScriptedEngine(), folder) as one:
        await one.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True})
        await one.post("/v1/completions", {"prompt": 5})
        health = (await one.get("/health")).json
        limits = {
            "model_id": "tiny",
            "context_length_tokens": 256,
            "max_running": 4,
            "kv_tokens": 1024,
            "max_prompt_tokens": 0,
            "max_new_tokens": 0,
            "continues_by": "replay",
            "paths": list(PATHS),
        }
        assert health == {
            "status": "ok",
            "progress": 4,
            "running": 0,
            "waiting": 0,
            "kv_blocks_used": 0,
            "block_violations": 0,
            "limits": limits,
        }
        page = (await one.get("/metrics")).body.decode()
        assert 'appliance_engine_requests_total{path="/v1/completions",outcome="finished"} 1' in page
        assert 'appliance_engine_requests_total{path="/v1/completions",outcome="refused"} 1' in page
        assert "appliance_engine_generated_tokens_total 4" in page
        assert 'appliance_engine_time_to_first_token_seconds_bucket{le="+Inf"} 1' in page
        names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
        typed = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE")}
        assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names} == typed


async def test_tokenize_and_detokenize(folder: Path) -> None:
    """A text's and a conversation's token ids, and back; the conversation's are those a chat would run with."""
    async with served(ScriptedEngine(), folder) as one:
        answer = (await one.post("/tokenize", {"prompt": SAID})).json
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
        assert (await one.post("/v1/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": SAID}
        chat = (await one.post("/tokenize", {"messages": HELLO})).json
        await one.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1})
        assert tuple(chat["tokens"]) == one.engine.submitted[0].prompt_ids
        everything = (await one.post("/detokenize", {"tokens": chat["tokens"], "skip_special_tokens": False})).json["prompt"]
        assert everything.startswith("<|im_start|>system\n")
        goes_on = {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True}
        open_ended = (await one.post("/tokenize", {**goes_on, "return_token_strs": True})).json
        await one.post("/v1/chat/completions", {**goes_on, "max_tokens": 1})
        assert tuple(open_ended["tokens"]) == one.engine.submitted[1].prompt_ids
        assert "".join(open_ended["token_strs"]).endswith("<|im_start|>assistant\nWell")
        closed = (await one.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False})).json
        assert chat["tokens"][: closed["count"]] == closed["tokens"]
        assert closed["count"] < chat["count"]


async def test_bos_where_the_model_wants_it(tmp_path: Path) -> None:
    """A prompt text gets the tokenizer's BOS (Gemma), token ids are taken as they are."""
    async with served(ScriptedEngine(), byte_fallback_folder(tmp_path)) as one:
        await one.post("/v1/completions", {"prompt": "dog", "max_tokens": 1})
        await one.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
        assert one.engine.submitted[0].prompt_ids[0] == 0
        assert one.engine.submitted[1].prompt_ids == (9,)
        refused = await one.post("/v1/chat/completions", {"messages": HELLO})
        assert (refused.status, refused.error["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in refused.error["message"]


async def test_developer_is_system_and_parts_are_one_text(folder: Path) -> None:
    """OpenAI's newer names mean what the model's template knows."""
    async with served(ScriptedEngine(), folder) as one:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        new = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
        old = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a\nb"}]
        for messages in (new, old):
            assert (await one.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})).status == 200
        assert one.engine.submitted[0].prompt_ids == one.engine.submitted[1].prompt_ids


def test_folder_is_the_real_kind(folder: Path) -> None:
    """The tests' model really has the two things that they are about: a template and multi-token characters."""
    text = ModelText(folder)
    assert text.chat_template is not None
    assert len(text.encode("🜁", add_special_tokens=False, most_tokens=10)) > 1
    assert byte_level_folder is not byte_fallback_folder


async def test_a_requests_priority_reaches_the_engine(folder: Path) -> None:
    """Of every endpoint that generates, for all of its answers; 0 without one."""
    async with saying(folder) as one:
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO, "n": 2}),
            ("/v1/completions", {"prompt": "x"}),
            ("/generate", {"text": "x"}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ):
            for priority in (-3, None):
                one.engine.submitted.clear()
                assert (await one.post(path, {**body, "priority": priority})).status == 200
                assert {request.priority for request in one.engine.submitted} == {priority or 0}
