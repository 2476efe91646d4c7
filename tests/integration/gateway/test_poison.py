"""One request kills every engine that has it. Its client alone sees an error; everybody else gets an answer, whole and right."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.core.launch import ContinuesBy, EngineLimits
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import Answer, GatewayProcess, ScriptedAppliance, appliance, eventually

Json = dict[str, Any]
POISON = 7
BY_IDS = EngineLimits("tiny", 4096, 8, 65536, continues_by=ContinuesBy.IDS)
DEADLY: Json = {"prompt": [POISON, 8, 9], "max_tokens": 30, "ignore_eos": True}


@contextlib.asynccontextmanager
async def watched(
    run_dir: Path, *engine: str, program: str, limits: EngineLimits
) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance]]:
    """A gateway, and engines that are started again whenever they die."""
    async with appliance(run_dir, engine=False) as (gateway, scripted):
        scripted.limits = limits
        await scripted.start_engine(*engine, program=program)
        keeping = asyncio.create_task(scripted.restart_whenever_it_dies(*engine, program=program))
        try:
            await gateway.until(lambda status: status["standing"] == "open", "open")
            yield gateway, scripted
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def noting(run_dir: Path) -> contextlib.AbstractAsyncContextManager[tuple[GatewayProcess, ScriptedAppliance]]:
    """Engines that note token ids, and die of a prompt that begins with POISON."""
    model = byte_level_folder(run_dir / "model")
    options = ("--model", str(model), "--step-s", "0.01", "--poison", str(POISON))
    return watched(run_dir, *options, program="serve_scripted.py", limits=BY_IDS)


def good(number: int) -> Json:
    """Streams and whole answers, each with a text of its own."""
    return {"prompt": [40 + number, 80 + number], "max_tokens": 30, "ignore_eos": True, "stream": number % 3 != 0}


def text_of(answer: Answer) -> str:
    """Of a completion, whole or streamed."""
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json()["choices"][0]["text"])
    events = [json.loads(data) for data in answer.events() if data != "[DONE]"]
    assert not any("error" in event for event in events), events[-1]
    assert answer.events()[-1] == "[DONE]"
    return "".join(event["choices"][0]["text"] for event in events)


async def test_of_thirty_one_clients_exactly_one_sees_an_error(run_dir: Path) -> None:
    """500 with the incident of the engine that died of it alone; the same again is 422; three engines died in all."""
    async with noting(run_dir) as (gateway, scripted):
        asked = [asyncio.ensure_future(gateway.post(good(number), "/v1/completions")) for number in range(15)]
        deadly = asyncio.ensure_future(gateway.post(DEADLY, "/v1/completions"))
        asked += [asyncio.ensure_future(gateway.post(good(number), "/v1/completions")) for number in range(15, 30)]
        answers = await asyncio.gather(*asked)
        told = await deadly
        again = await gateway.post(DEADLY, "/v1/completions")
        undisturbed = [await gateway.post(good(number), "/v1/completions") for number in range(3)]
        status = await gateway.status()
    assert [answer.status for answer in answers] == [200] * 30
    texts = [text_of(answer) for answer in answers]
    assert [text_of(answer) for answer in undisturbed] == texts[:3]
    assert len(set(texts)) == 30
    error = told.error()
    assert (told.status, error["code"], error["incident_id"]) == (500, "request_quarantined", "inc-3")
    assert (again.status, again.error()["code"], again.error()["incident_id"]) == (422, "request_quarantined", "inc-3")
    assert scripted.generation == 4
    assert status["slots"]["in_use"] == status["queue"]["length"] == 0


async def test_engines_that_cannot_go_on_are_no_different(run_dir: Path) -> None:
    """Comparing instead of continuing, and no taking back: the trial waits for the others."""
    async with watched(run_dir, program="upstream.py", limits=EngineLimits("fake", 4096, 8, 65536)) as (gateway, scripted):
        bodies: list[Json] = [{"do": "whole", "delay_s": 0.2, "bytes": number} for number in range(10)]
        bodies += [{"do": "stream", "stream": True, "temperature": 0, "events": 10, "gap_s": 0.02, "n": number} for number in range(10)]
        asked = [asyncio.ensure_future(gateway.post(body)) for body in bodies[:5] + bodies[10:15]]
        deadly = asyncio.ensure_future(gateway.post({"do": "die", "after_events": 0, "stream": True}))
        asked += [asyncio.ensure_future(gateway.post(body)) for body in bodies[5:10] + bodies[15:]]
        answers = await asyncio.gather(*asked)
        told = await deadly
    assert [answer.status for answer in answers] == [200] * 20
    assert all(answer.events()[-1] == "[DONE]" for answer in answers if b"data:" in answer.body)
    assert (told.status, told.error()["code"]) == (500, "request_quarantined")
    assert scripted.generation == 4


async def test_who_leaves_and_comes_back_is_not_a_stranger(run_dir: Path) -> None:
    """A client that gives up after two crashes and tries again is tried alone at once; nobody else is with it."""
    async with noting(run_dir) as (gateway, scripted):
        async with gateway.connection() as connection:
            connection.send("POST", "/v1/completions", DEADLY)
            await eventually(lambda: scripted.generation >= 3, "two engines have died")
        await gateway.until(lambda status: not status["inflight"] and status["standing"] == "open", "it is gone")
        generation = scripted.generation
        beside = [asyncio.ensure_future(gateway.post(good(number), "/v1/completions")) for number in range(4)]
        told = await gateway.post(DEADLY, "/v1/completions")
        answers = await asyncio.gather(*beside)
    assert generation in (3, 4)  # it may have been tried alone already, just before it left
    assert told.status in (500, 422)
    assert scripted.generation == 4
    assert [answer.status for answer in answers] == [200] * 4


async def test_the_same_poison_twice_costs_no_more_engines(run_dir: Path) -> None:
    """Two clients with the same body: one trial convicts both."""
    async with noting(run_dir) as (gateway, scripted):
        told = await asyncio.gather(*(gateway.post({**DEADLY, "stream": stream}, "/v1/completions") for stream in (True, True, True)))
        assert scripted.generation == 4
        other = await gateway.post({**DEADLY, "prompt": [8, 9]}, "/v1/completions")
    assert sorted(answer.status for answer in told)[-1] == 500
    assert {answer.status for answer in told} <= {500, 422}
    assert {answer.error()["code"] for answer in told} == {"request_quarantined"}
    assert other.status == 200


async def test_copies_of_a_poison_that_come_later_cost_no_engines(run_dir: Path) -> None:
    """While it waits for its trial (the others go first), the same body comes again and again: all share its fate, none is let in."""
    long: Json = {"prompt": [50, 60], "max_tokens": 400, "ignore_eos": True}
    async with noting(run_dir) as (gateway, scripted):
        others = [asyncio.ensure_future(gateway.post({**long, "prompt": [50, 60 + number]}, "/v1/completions")) for number in range(3)]
        await gateway.until(lambda status: status["slots"]["in_use"] == 3, "they run")
        asked = [asyncio.ensure_future(gateway.post(DEADLY, "/v1/completions"))]
        await eventually(lambda: "it will be tried alone" in gateway.log.read_text(), "it is suspected")
        for _ in range(4):
            asked.append(asyncio.ensure_future(gateway.post(DEADLY, "/v1/completions")))
            await asyncio.sleep(0.1)
        told = await asyncio.gather(*asked)
        answers = await asyncio.gather(*others)
    assert {answer.status for answer in told} <= {500, 422}
    assert {answer.error()["code"] for answer in told} == {"request_quarantined"}
    assert [answer.status for answer in answers] == [200] * 3
    assert scripted.generation == 4


async def test_copies_of_a_poison_that_wait_for_a_slot_cost_no_engines(run_dir: Path) -> None:
    """They came before it was suspected, and their turn comes while it waits for its trial, or when it has been convicted."""
    async with noting(run_dir) as (gateway, scripted):
        scripted.limits = replace(BY_IDS, max_running=2)
        scripted.serve()
        await gateway.until(lambda status: status["slots"]["capacity"] == 2, "two slots")
        good_ones = [{"prompt": [50, 60 + number], "max_tokens": 150, "ignore_eos": True} for number in range(4)]
        asked = [
            asyncio.ensure_future(gateway.post(body, "/v1/completions")) for body in (good_ones[0], DEADLY, DEADLY, *good_ones[1:], DEADLY)
        ]
        answers = await asyncio.gather(*asked)
    told = [answers[place] for place in (1, 2, 6)]
    assert {answer.status for answer in told} <= {500, 422}
    assert {answer.error()["code"] for answer in told} == {"request_quarantined"}
    assert [answers[place].status for place in (0, 3, 4, 5)] == [200] * 4
    assert scripted.generation == 4


async def test_a_poison_in_the_middle_of_its_stream_is_found_too(run_dir: Path) -> None:
    """It has got far before it kills: the client has a beginning, and then an error event with the incident."""
    async with watched(run_dir, program="upstream.py", limits=EngineLimits("fake", 4096, 8, 65536)) as (gateway, scripted):
        told = await gateway.post({"do": "die", "after_events": 5, "events": 10, "stream": True, "temperature": 0})
    events = [json.loads(data) for data in told.events()]
    assert len(events) == 6
    assert (events[-1]["error"]["code"], events[-1]["error"]["incident_id"]) == ("request_quarantined", f"inc-{scripted.generation - 1}")
    assert scripted.generation == 4


async def test_an_innocent_suspect_is_tried_answered_and_holds_up_nobody(run_dir: Path) -> None:
    """It lost two engines by chance; in its trial the engine lives; behind it the lane is open again."""
    async with watched(run_dir, program="upstream.py", limits=EngineLimits("fake", 4096, 8, 65536)) as (gateway, scripted):
        suspect = asyncio.ensure_future(gateway.post({"do": "whole", "delay_s": 0.5}))
        for generation in (1, 2):
            await gateway.until(lambda status, g=generation: any(one["generation"] == g for one in status["inflight"]), "with the engine")
            scripted.kill_engine()
        assert (await suspect).status == 200
        assert "tried alone" in gateway.log.read_text()
        answers = await asyncio.wait_for(asyncio.gather(*(gateway.post({"do": "whole"}) for _ in range(10))), 5)
    assert [answer.status for answer in answers] == [200] * 10
    assert scripted.generation == 3


async def test_two_killers_of_one_length_have_the_length_refused(run_dir: Path) -> None:
    """Whatever their words: the third prompt of that length costs no engine, and its neighbours in length are answered."""
    model = byte_level_folder(run_dir / "model")
    options = ("--model", str(model), "--step-s", "0.002", "--poison-length", "17")

    def prompt(first: int, length: int) -> Json:
        return {"prompt": [first, *range(20, 19 + length)], "max_tokens": 3}

    async with watched(run_dir, *options, program="serve_scripted.py", limits=BY_IDS) as (gateway, scripted):
        first = await gateway.post(prompt(1, 17), "/v1/completions")
        second = await gateway.post(prompt(2, 17), "/v1/completions")
        await eventually(lambda: "exactly 17 tokens are refused from now on" in gateway.log.read_text(), "the length is learned")
        await gateway.until(lambda status: status["standing"] == "open", "the next engine is there")
        generation = scripted.generation
        third = await gateway.post(prompt(3, 17), "/v1/completions")
        neighbours = [await gateway.post(prompt(3, length), "/v1/completions") for length in (16, 18)]
        lost = scripted.generation - generation
    assert [answer.status for answer in (first, second)] == [500, 500]
    assert (third.status, third.error()["code"]) == (422, "length_fused")
    assert "engines have died of different ones of this length" in third.error()["message"]
    assert [answer.status for answer in neighbours] == [200, 200]
    assert lost == 0
