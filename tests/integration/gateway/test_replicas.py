"""An engine on each of two cards behind one gateway: shared by load and by beginnings, and one that dies is an event for nobody."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from appliance.core.launch import ContinuesBy, EngineLimits
from appliance.core.states import EngineState
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import Answer, GatewayProcess, eventually
from tests.fakes.scripted_replicas import replicas
from tests.integration.gateway.test_poison import DEADLY, POISON, good, text_of

Json = dict[str, Any]
BY_IDS = EngineLimits("tiny", 4096, 8, 65536, continues_by=ContinuesBy.IDS)
STREAM: Json = {"do": "stream", "stream": True, "events": 200, "gap_s": 0.05}


def said_by(answer: Answer) -> str:
    """The word that its engine says."""
    events = [json.loads(data) for data in answer.events() if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"]).strip()[:3]


def turn(name: str, *later: str) -> Json:
    """A chat, as far as it has come."""
    messages = [{"role": "user", "content": name}]
    for question in later:
        messages += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": question}]
    return {"do": "words", "stream": True, "events": 1, "gap_s": 0, "model": "fake", "messages": messages}


def busy(status: Json) -> list[int]:
    """Slots in use, by engine."""
    return [one["slots"]["in_use"] for one in status["engines"]]


async def metrics(gateway: GatewayProcess) -> str:
    """The page."""
    return (await gateway.ask("GET", "/metrics")).body.decode()


async def test_requests_are_shared_by_free_slots(run_dir: Path) -> None:
    """Eight fill two engines of four slots; the ninth waits, and goes where one becomes free."""
    async with replicas(run_dir, max_running=4) as (gateway, _):
        connections = [gateway.connection() for _ in range(9)]
        for number, connecting in enumerate(connections):
            connection = await connecting.__aenter__()
            connection.send("POST", "/v1/chat/completions", {**STREAM, "n": number})
        status = await gateway.until(lambda status: status["queue"]["length"] == 1, "the ninth waits")
        assert (busy(status), status["slots"]["capacity"], status["slots"]["in_use"]) == ([4, 4], 8, 8)
        assert Counter(one["replica"] for one in status["slots"]["holding"]) == {0: 4, 1: 4}
        await connections[0].__aexit__(None, None, None)
        status = await gateway.until(lambda status: not status["queue"]["length"], "it has its slot")
        assert busy(status) == [4, 4]
        for connecting in connections[1:]:
            await connecting.__aexit__(None, None, None)


async def test_an_idle_engine_is_not_left_idle(run_dir: Path) -> None:
    """However alike the beginnings: the difference stays within a quarter of the slots."""
    async with replicas(run_dir) as (gateway, _), asyncio.TaskGroup() as asking:
        for _ in range(8):
            asking.create_task(gateway.post({**STREAM, "events": 40, "messages": [{"role": "user", "content": "the same"}]}))
        status = await gateway.until(lambda status: status["slots"]["in_use"] == 8, "all are in")
        assert sorted(busy(status)) == [3, 5]


async def test_the_next_turn_of_a_chat_goes_to_the_same_engine(run_dir: Path) -> None:
    """Its beginning lies in the prefix cache there. When that engine is out, only its own chats move, and they come back."""
    names = [f"chat number {number}" for number in range(24)]
    async with replicas(run_dir, each=lambda index: ("--says", "AB"[index] * 3)) as (gateway, scripted):

        async def homes(*later: str) -> dict[str, str]:
            return {name: said_by(await gateway.post(turn(name, *later))) for name in names}

        first = await homes()
        assert set(first.values()) == {"AAA", "BBB"}
        assert await homes("and then?") == first
        await scripted.engines[0].crash()
        await gateway.until(lambda status: status["engines"][0]["standing"] == "hold", "it is out")
        assert set((await homes("and then?", "go on")).values()) == {"BBB"}
        await scripted.engines[0].start_engine("--says", "AAA")
        await gateway.until(lambda status: status["engines"][0]["standing"] == "open", "it is back")
        assert await homes("and then?", "go on", "thank you") == first


async def test_an_engine_is_killed_under_eight_streams_and_no_client_sees_it(run_dir: Path) -> None:
    """They go on at the other at once, each text as it would have been; the dead one does not have to come back for that."""
    model = byte_level_folder(run_dir / "model")
    options = ("--model", str(model), "--step-s", "0.02")
    async with replicas(run_dir, program="serve_scripted.py", each=lambda _: options, limits=[BY_IDS] * 2) as (gateway, scripted):
        bodies = [{"prompt": [40 + number, 90], "max_tokens": 100, "ignore_eos": True, "stream": number % 4 != 3} for number in range(8)]
        wanted = await asyncio.gather(*(gateway.post(body, "/v1/completions") for body in bodies))
        asked = [asyncio.ensure_future(gateway.post(body, "/v1/completions")) for body in bodies]
        status = await gateway.until(lambda status: sum(one["tokens"] > 5 for one in status["slots"]["holding"]) == 8, "all have begun")
        with_it = busy(status)[0]
        assert 0 < with_it < 8
        scripted.engines[0].kill_engine()
        answers = await asyncio.gather(*asked)
        status = await gateway.status()
        page = await metrics(gateway)
    assert [answer.status for answer in answers] == [200] * 8
    assert [text_of(answer) for answer in answers] == [text_of(answer) for answer in wanted]
    assert status["totals"]["resent"] == with_it
    assert (status["standing"], [one["standing"] for one in status["engines"]]) == ("open", ["hold", "open"])
    assert "1 of 2 engines answer; engine 0: the connection to the engine was lost" in status["sentence"]
    for line in ('appliance_replica_up{replica="0"} 0.0', 'appliance_replica_up{replica="1"} 1.0', "appliance_up 1.0"):
        assert line in page
    assert 'appliance_engine_running_requests{replica="1"}' in page
    (report,) = [report for report in scripted.reports if report["kind"] == "upstream_lost"]
    assert [one["replica"] for one in report["requests"]] == [0] * with_it


async def test_health_is_good_while_one_engine_answers(run_dir: Path) -> None:
    """200 with the sentence that names the other; with both out, 503 and when to come again."""
    async with replicas(run_dir) as (gateway, scripted):
        await scripted.engines[1].crash(reason="the engine died of SIGKILL")
        await gateway.until(lambda status: status["engines"][1]["standing"] == "hold", "one is out")
        healthy = await gateway.ask("GET", "/health")
        models = await gateway.ask("GET", "/v1/models")
        await scripted.engines[0].crash(reason="the engine died of SIGSEGV")
        await gateway.until(lambda status: status["standing"] == "hold", "both are out")
        ill = await gateway.ask("GET", "/health")
    assert (healthy.status, models.status) == (200, 200)
    assert healthy.json()["sentence"] == "1 of 2 engines serves; card 0000:02:00: the engine died of SIGKILL"
    assert (ill.status, ill.headers["retry-after"]) == (503, "3")
    assert ill.error()["message"] == (
        "none of 2 engines serve; card 0000:01:00: the engine died of SIGSEGV; card 0000:02:00: the engine died of SIGKILL"
    )


async def test_with_both_out_requests_are_held_until_one_is_back(run_dir: Path) -> None:
    """As with one engine."""
    async with replicas(run_dir) as (gateway, scripted):
        for engine in scripted.engines:
            await engine.crash()
        await gateway.until(lambda status: status["standing"] == "hold", "both are out")
        asked = [asyncio.ensure_future(gateway.post({"do": "whole", "bytes": number})) for number in range(4)]
        await gateway.until(lambda status: status["queue"]["length"] == 4, "they wait")
        await scripted.engines[1].start_engine()
        answers = await asyncio.gather(*asked)
        for engine in scripted.engines:
            engine.say(EngineState.PARKED, "a person is needed", retry_after_s=None)
        refused = await gateway.until(lambda status: status["standing"] == "refuse", "both are parked")
        told = await gateway.post({"do": "whole"})
    assert [answer.status for answer in answers] == [200] * 4
    assert refused["sentence"] == "a person is needed"
    assert (told.status, told.error()["code"]) == (503, "engine_parked")


async def test_of_thirty_one_clients_exactly_one_sees_an_error(run_dir: Path) -> None:
    """A poison kills one engine, then the other, then one more alone with it: three deaths, whichever they were of."""
    model = byte_level_folder(run_dir / "model")
    options = ("--model", str(model), "--step-s", "0.01", "--poison", str(POISON))
    async with replicas(run_dir, program="serve_scripted.py", each=lambda _: options, limits=[BY_IDS] * 2) as (gateway, scripted):
        async with scripted.kept(*options, program="serve_scripted.py"):
            asked = [asyncio.ensure_future(gateway.post(good(number), "/v1/completions")) for number in range(15)]
            deadly = asyncio.ensure_future(gateway.post(DEADLY, "/v1/completions"))
            asked += [asyncio.ensure_future(gateway.post(good(number), "/v1/completions")) for number in range(15, 30)]
            answers = await asyncio.gather(*asked)
            told = await deadly
            again = await gateway.post(DEADLY, "/v1/completions")
            status = await gateway.status()
        lives = [engine.generation for engine in scripted.engines]
    assert [answer.status for answer in answers] == [200] * 30
    assert len({text_of(answer) for answer in answers}) == 30
    assert (told.status, told.error()["code"]) == (500, "request_quarantined")
    assert told.error()["incident_id"]
    assert (again.status, again.error()["code"]) == (422, "request_quarantined")
    assert sum(lives) == 2 + 3
    assert status["slots"]["in_use"] == status["queue"]["length"] == 0


async def test_what_copies_of_one_poison_did_does_not_excuse_the_next(run_dir: Path) -> None:
    """Copies of one body lose different engines, and one's client leaves: all of it is explained, so another body costs three engines."""
    model = byte_level_folder(run_dir / "model")
    options = ("--model", str(model), "--step-s", "0.01", "--poison", str(POISON))
    async with (
        replicas(run_dir, program="serve_scripted.py", each=lambda _: options, limits=[BY_IDS] * 2) as (gateway, scripted),
        scripted.kept(*options, program="serve_scripted.py"),
    ):

        def lives() -> int:
            return sum(engine.generation for engine in scripted.engines)

        copies = [asyncio.ensure_future(gateway.post(DEADLY, "/v1/completions")) for _ in range(4)]
        async with gateway.connection() as connection:
            connection.send("POST", "/v1/completions", DEADLY)
            await eventually(lambda: lives() >= 4, "two engines have died")
        told = await asyncio.gather(*copies)
        before = lives()
        other = await gateway.post({**DEADLY, "prompt": [*DEADLY["prompt"], 10]}, "/v1/completions")
        after = lives()
    assert [answer.error()["code"] for answer in [*told, other]] == ["request_quarantined"] * 5
    assert (before - 2 <= 5, after - before) == (True, 3), f"{before - 2} engines died of the first"


async def test_a_suspect_is_tried_on_one_engine_and_the_other_serves_everybody(run_dir: Path) -> None:
    """Its like is known from two deaths; while it is alone with its engine, newcomers are answered by the other."""
    async with replicas(run_dir) as (gateway, scripted):
        slow: Json = {"do": "die", "after_events": 0, "stream": True}
        first = asyncio.ensure_future(gateway.post(slow))
        for engine in scripted.engines:
            await eventually(lambda engine=engine: engine.engine is not None and engine.engine.returncode is not None, "it has died")
        for engine in scripted.engines:
            engine.say(EngineState.BACKOFF, "it died", incident_id=f"inc-{engine.generation}")
        await scripted.engines[0].start_engine()
        await gateway.until(lambda status: status["engines"][0]["standing"] == "open", "one is back")
        answered = await gateway.post({"do": "whole"})
        waiting = await gateway.status()
        assert not first.done(), "it waits for the second engine"
        alive = scripted.engines[0].engine
        assert alive is not None
        assert alive.returncode is None
        long = asyncio.ensure_future(gateway.post({**STREAM, "events": 40}))
        await gateway.until(lambda status: busy(status)[0] == 1, "somebody is with the first engine")
        await scripted.engines[1].start_engine()
        tried = scripted.engines[1].engine
        assert tried is not None
        await asyncio.wait_for(tried.wait(), 20.0)
        scripted.engines[1].say(EngineState.BACKOFF, "it died", incident_id="inc-alone")
        told, streamed = await first, await long
        assert alive.returncode is None
    assert answered.status == 200
    assert busy(waiting) == [0, 0]
    assert (told.status, told.error()["code"], told.error()["incident_id"]) == (500, "request_quarantined", "inc-alone")
    assert (streamed.status, streamed.events()[-1]) == (200, "[DONE]")


async def test_a_broken_connection_of_a_living_engine_is_no_crash(run_dir: Path) -> None:
    """It is asked whether it lives, and goes on; its request went to the other one, and is suspected of nothing."""
    async with replicas(run_dir) as (gateway, _):
        cut = {"do": "raw", "text": "HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf", "close": True}
        told = await gateway.post(cut)
        status = await gateway.until(lambda status: [one["standing"] for one in status["engines"]] == ["open", "open"], "both answer")
        good_one = await gateway.post({"do": "whole"})
    assert told.status == 503
    assert told.error()["code"] == "engine_lost_repeatedly"
    assert (status["totals"]["upstream_losses"], good_one.status) == ({"reset": 3}, 200)


async def test_a_long_prompt_goes_to_the_engine_that_takes_it(run_dir: Path) -> None:
    """One is on a rung with a shorter context; what only the other takes goes there, what neither takes is refused with both numbers."""
    model = byte_level_folder(run_dir / "model")
    limits = [EngineLimits("tiny", context, 8, 65536, continues_by=ContinuesBy.IDS) for context in (256, 4096)]

    def each(index: int) -> tuple[str, ...]:
        return ("--model", str(model), "--context", str(limits[index].context_length_tokens))

    async with replicas(run_dir, program="serve_scripted.py", each=each, limits=limits) as (gateway, _):
        long = [await gateway.post({"prompt": [50] * 1000 + [number], "max_tokens": 3}, "/v1/completions") for number in range(1, 9)]
        short = [await gateway.post({"prompt": [60, number], "max_tokens": 3}, "/v1/completions") for number in range(1, 9)]
        too_long = await gateway.post({"prompt": [50] * 5000, "max_tokens": 3}, "/v1/completions")
    assert [answer.status for answer in long + short] == [200] * 16
    assert (too_long.status, too_long.error()["code"]) == (422, "context_length_exceeded")
    assert "4095" in too_long.error()["message"]
