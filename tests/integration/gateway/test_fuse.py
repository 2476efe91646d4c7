"""The length fuse in front of the engine's real HTTP side: its tokenizer, its template, its process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.core.launch import EngineLimits
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import ROOT, Answer, GatewayProcess, ScriptedAppliance, appliance, eventually

CHAT = "/v1/chat/completions"
CONTEXT = 4096
"""Of tests.fakes.serve_scripted."""


@contextlib.asynccontextmanager
async def engine_behind(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, step_s: float = 0.0
) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance]]:
    """A gateway before the engine's HTTP side."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = byte_level_folder(run_dir / "model")
    async with appliance(run_dir, *settings, engine=False) as (running, scripted):
        scripted.limits = EngineLimits("tiny", CONTEXT, 4, 4 * CONTEXT)
        path = await scripted.start_engine("--model", str(folder), "--step-s", str(step_s), program="serve_scripted.py", publish=False)
        await eventually(lambda: is_healthy(path), "the model is loaded")
        scripted.serve()
        await running.until(lambda status: status["standing"] == "open", "the gateway is open")
        yield running, scripted


def is_healthy(path: Path) -> bool:
    """Whether the engine on this socket says that it is ready."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        return probe.recv(100).startswith(b"HTTP/1.1 200")


async def asked(running: GatewayProcess, content: str, max_tokens: int = 1, **headers: str) -> Answer:
    """One message."""
    return await running.ask("POST", CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}, **headers)


async def metric(running: GatewayProcess, line: str) -> float:
    """The value of a series; 0 where it is not there."""
    page = (await running.ask("GET", "/metrics")).body.decode()
    return next((float(found.split()[-1]) for found in page.splitlines() if found.startswith(f"{line} ")), 0.0)


async def test_a_prompt_that_is_too_long_is_refused_before_it_waits(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """422 with both numbers while every slot is taken; counted in the metrics; the engine's own words."""
    async with engine_behind(run_dir, monkeypatch, "admission.max_concurrent_decodes=1", step_s=0.05) as (running, _):
        held = asyncio.ensure_future(asked(running, "hello", max_tokens=100))
        await running.until(lambda status: status["slots"]["in_use"] == 1, "the slot is taken")
        long = await asyncio.wait_for(asked(running, "word " * 3000), 4)
        status = await running.status()
        trips = await metric(running, 'appliance_fuse_trips_total{code="context_length_exceeded"}')
        held.cancel()
    assert (long.status, long.error()["code"], long.error()["param"]) == (422, "context_length_exceeded", "messages")
    assert "tokens" in long.error()["message"]
    assert str(CONTEXT) in long.error()["message"]
    assert (status["slots"]["in_use"], status["queue"]["length"]) == (1, 0)
    assert trips == 1


async def test_short_prompts_are_not_counted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost no second question to the engine."""
    async with engine_behind(run_dir, monkeypatch, "admission.max_prompt_tokens=0") as (running, scripted):
        scripted.serve(EngineLimits("tiny", 100_000, 4, 400_000))
        await running.until(lambda status: status["publication"]["limits"]["context_length_tokens"] == 100_000, "limits")
        assert (await asked(running, "hello " * 20)).status == 200
        assert await metric(running, "appliance_prompt_count_seconds_count") == 0


async def test_the_owner_s_limit_is_in_tokens(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: the longest that fits goes, one token more does not."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        ten, eleven = [(await asked(running, "dog " * count)).json()["usage"]["prompt_tokens"] for count in (10, 11)]
    assert eleven > ten
    (run_dir / "again").mkdir()
    async with engine_behind(run_dir / "again", monkeypatch, f"admission.max_prompt_tokens={ten}") as (running, _):
        fits, exceeds = await asked(running, "dog " * 10), await asked(running, "dog " * 11)
    assert fits.status == 200
    assert (exceeds.status, exceeds.error()["code"]) == (422, "context_length_exceeded")
    assert f"the prompt has {eleven} tokens, and the limit is [admission] max_prompt_tokens {ten}" in exceeds.error()["message"]


async def test_a_fused_length_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours are not."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        nine, ten = [(await asked(running, "dog " * count)).json()["usage"]["prompt_tokens"] for count in (9, 10)]
    (run_dir / "again").mkdir()
    async with engine_behind(run_dir / "again", monkeypatch, f"admission.fused_lengths=[{ten}, 9999]") as (running, _):
        refused, passed = await asked(running, "dog " * 10), await asked(running, "dog " * 9)
        trips = await metric(running, 'appliance_fuse_trips_total{code="length_fused"}')
    assert nine != ten
    assert (refused.status, refused.error()["code"]) == (422, "length_fused")
    assert f"{ten} tokens" in refused.error()["message"]
    assert passed.status == 200
    assert trips == 1


async def test_a_fused_length_that_came_during_a_crash_is_refused_after_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could count it when it came: it is counted when there is an engine again, and before that gets the prompt."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        fused = (await asked(running, "dog " * 10)).json()["usage"]["prompt_tokens"]
    (run_dir / "again").mkdir()
    async with engine_behind(run_dir / "again", monkeypatch, f"admission.fused_lengths=[{fused}]") as (running, scripted):
        await scripted.crash()
        held = [asyncio.ensure_future(asked(running, "dog " * count)) for count in (10, 9)]
        await running.until(lambda status: status["queue"]["length"] == 2, "both are held")
        path = await scripted.start_engine("--model", str(run_dir / "again/model"), program="serve_scripted.py", publish=False)
        await eventually(lambda: is_healthy(path), "the model is loaded")
        scripted.serve()
        refused, passed = [await task for task in held]
    assert (refused.status, refused.error()["code"]) == (422, "length_fused")
    assert passed.status == 200


async def test_a_smaller_context_after_a_crash_is_said_with_both_numbers(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last engine would have taken and the next one cannot: 422, and no third engine is tried."""
    async with engine_behind(run_dir, monkeypatch, "admission.max_prompt_tokens=200") as (running, scripted):
        await scripted.crash()
        held = asyncio.ensure_future(asked(running, "dog " * 60))
        await running.until(lambda status: status["queue"]["length"] == 1, "it is held")
        path = await scripted.start_engine("--model", str(run_dir / "model"), program="serve_scripted.py", publish=False)
        await eventually(lambda: is_healthy(path), "the model is loaded")
        scripted.serve(EngineLimits("tiny", 64, 4, 256))
        refused = await held
    assert (refused.status, refused.error()["code"]) == (422, "context_length_exceeded")
    assert re.search(r"the prompt has \d+ tokens, and the limit is the engine's 63", refused.error()["message"])


async def test_an_engine_that_cannot_count_judges_itself(run_dir: Path) -> None:
    """It answers 404 to the question: nobody is refused for it, and it is asked once."""
    async with appliance(run_dir, "admission.max_prompt_tokens=10", program="engine.py") as (running, _):
        answers = [await running.post({"messages": [], "prompt": "x" * 9000, "max_tokens": 1}) for _ in range(2)]
        log = running.log.read_text()
    assert [answer.status for answer in answers] == [200, 200]
    assert log.count("this engine does not count prompts") == 1


async def test_clients_cannot_ask_for_counts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is between gateway and engine."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        answer = await running.ask("POST", "/appliance/count/v1/chat/completions", {"messages": []})
    assert (answer.status, answer.error()["code"]) == (404, "unknown_path")


async def test_a_conversation_that_is_too_long_is_made_shorter(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`truncate`: as many of its oldest turns go as must, the answer says so, and nothing is said where nothing was done."""
    turns = [{"role": role, "content": f"{number} " + "word " * 300} for number in range(6) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "last"}]
    async with engine_behind(run_dir, monkeypatch, "admission.length_policy=truncate") as (running, _):
        long = await running.post({"messages": messages, "max_tokens": 100})
        text = await running.post({"prompt": "word " * 3000, "max_tokens": 100}, "/v1/completions")
        short = await asked(running, "hello")
        single = await asked(running, "word " * 3000)
        altered = await metric(running, 'appliance_prompts_altered_total{how="truncated"}')
    assert (long.status, long.headers["x-appliance-prompt"]) == (200, "truncated")
    assert CONTEXT - 100 - 2 * 1600 < long.json()["usage"]["prompt_tokens"] <= CONTEXT - 100
    assert (text.status, text.headers["x-appliance-prompt"]) == (200, "truncated")
    assert CONTEXT * 0.8 < text.json()["usage"]["prompt_tokens"] <= CONTEXT - 100
    assert (short.status, short.headers.get("x-appliance-prompt")) == (200, None)
    assert (single.status, single.error()["code"]) == (422, "context_length_exceeded")
    assert altered == 2


async def test_a_fused_length_is_stepped_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pad`: a line break more, and the engine never sees a prompt of that length."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        fused = (await asked(running, "dog " * 10)).json()["usage"]["prompt_tokens"]
    (run_dir / "again").mkdir()
    settings = (f"admission.fused_lengths=[{fused},{fused + 1}]", "admission.length_policy=pad")
    async with engine_behind(run_dir / "again", monkeypatch, *settings) as (running, _):
        padded = await asked(running, "dog " * 10)
        long = await asked(running, "word " * 3000)
    assert (padded.status, padded.headers.get("x-appliance-prompt")) == (200, "padded"), padded.body
    assert fused + 1 < padded.json()["usage"]["prompt_tokens"] < fused + 9
    assert long.status == 422


async def test_a_fused_length_goes_to_its_bucket(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, over more than one token; a bucket out of reach is refused with both numbers under `pad`, and cut under `truncate`."""
    async with engine_behind(run_dir, monkeypatch) as (running, _):
        fused, far = [(await asked(running, "dog " * count)).json()["usage"]["prompt_tokens"] for count in (20, 40)]
        prompt = (await running.post({"prompt": "dog " * 100, "max_tokens": 1}, "/v1/completions")).json()["usage"]["prompt_tokens"]
    assert fused + 7 < far < prompt
    settings = (f"admission.fused_lengths=[{fused},{far},{prompt}]", f"admission.length_buckets=[{fused + 7},{prompt + 100}]")
    for policy, cut in (("pad", 422), ("truncate", 200)):
        (run_dir / policy).mkdir()
        async with engine_behind(run_dir / policy, monkeypatch, *settings, f"admission.length_policy={policy}") as (running, _):
            padded, refused = await asked(running, "dog " * 20), await asked(running, "dog " * 40)
            text = await running.post({"prompt": "dog " * 100, "max_tokens": 1}, "/v1/completions")
        assert (padded.headers.get("x-appliance-prompt"), padded.json()["usage"]["prompt_tokens"]) == ("padded", fused + 7)
        assert (refused.status, refused.error()["code"]) == (422, "length_fused")
        assert f"the next of [admission] length_buckets is {prompt + 100}" in refused.error()["message"]
        assert text.status == cut
    assert text.headers["x-appliance-prompt"] == "truncated"
    assert fused + 7 < text.json()["usage"]["prompt_tokens"] <= prompt
