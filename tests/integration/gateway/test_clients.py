"""The openai client, unmodified, through the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.fakes.scripted_appliance import GatewayProcess, appliance

MESSAGES = [{"role": "user", "content": "hello"}]


def client_of(running: GatewayProcess) -> openai.AsyncOpenAI:
    """One that hides nothing by trying again itself."""
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)


async def test_chat_whole_and_streamed_and_completions(run_dir: Path) -> None:
    """Every token, in order, and the models."""
    async with appliance(run_dir, program="engine.py") as (running, _), client_of(running) as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        completion = await client.completions.create(model="fake", prompt="x", max_tokens=3)
        models = [model.id async for model in client.models.list()]
    assert whole.choices[0].message.content == streamed == " t0 t1 t2 t3 t4"
    assert completion.choices[0].text == " t0 t1 t2"
    assert models == ["fake"]


async def test_a_crash_before_the_answer_is_not_seen(run_dir: Path) -> None:
    """Neither by a whole answer nor by a stream that had not begun."""
    async with appliance(run_dir) as (running, scripted), client_of(running) as client:
        body = {"do": "stream", "events": 3, "gap_s": 0.3, "role": True}
        asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_body=body))
        await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
        await scripted.crash()
        await scripted.start_engine()
        words = [chunk.choices[0].delta.content async for chunk in await asked]
    assert [word.split()[0] for word in words if word] == ["t0", "t1", "t2"]


async def test_a_crash_in_the_middle_of_a_stream_raises_in_the_client(run_dir: Path) -> None:
    """APIError with our sentence and the code; never a short answer that looks whole."""
    async with appliance(run_dir) as (running, scripted), client_of(running) as client:
        body = {"do": "stream", "events": 100, "gap_s": 0.05}
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_body=body)
        with pytest.raises(openai.APIError, match="the engine was lost while this answer was being written") as error:
            async for _ in stream:
                if scripted.engine is not None and scripted.engine.returncode is None:
                    await scripted.crash(incident_id="inc-5")
    assert error.value.code == "engine_lost"
    assert error.value.body["incident_id"] == "inc-5"


async def test_refusals_are_the_exceptions_the_client_knows(run_dir: Path) -> None:
    """429 is RateLimitError with Retry-After; 503 is InternalServerError with the sentence."""
    async with (
        appliance(run_dir, "admission.max_concurrent_decodes=1", "admission.queue_size=0") as (running, scripted),
        client_of(running) as client,
    ):
        busy = asyncio.ensure_future(running.post({"do": "never"}))
        await running.until(lambda status: status["slots"]["in_use"] == 1, "busy")
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        busy.cancel()
        await running.until(lambda status: status["slots"]["in_use"] == 0, "free")
        await scripted.crash(reason="the card fell off the bus")
        await running.until(lambda status: status["standing"] == "hold", "held")
        with pytest.raises(openai.InternalServerError, match="the card fell off the bus"):
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert limited.value.response.headers["retry-after"] == "1"
    assert limited.value.code == "queue_full"
