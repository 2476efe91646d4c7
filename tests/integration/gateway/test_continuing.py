"""Answers that have begun go on over the engine's death: the real engine's HTTP side over a scripted engine, killed for real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.launch import ContinuesBy, EngineLimits
from appliance.core.states import EngineState
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import Answer, Connection, GatewayProcess, ScriptedAppliance, appliance, eventually

Json = dict[str, Any]
STEP_S = 0.02
BY_IDS = EngineLimits("tiny", 4096, 8, 65536, continues_by=ContinuesBy.IDS)
CHAT: Json = {"messages": [{"role": "user", "content": "The 🙂 quick “brown” fox いろは"}], "max_tokens": 60, "ignore_eos": True}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
RESTARTING = b": restarting engine\n\n"


class Appliance:
    """A gateway, and engines that note token ids."""

    def __init__(self, gateway: GatewayProcess, scripted: ScriptedAppliance, model: Path) -> None:
        self.gateway = gateway
        self.scripted = scripted
        self.model = model

    async def start(self, *arguments: str, step_s: float = STEP_S) -> None:
        """The next engine life."""
        options = ("--model", str(self.model), "--step-s", str(step_s), *arguments)
        await self.scripted.start_engine(*options, program="serve_scripted.py", publish=False)
        self.scripted.serve(BY_IDS)
        await self.gateway.until(lambda status: status["standing"] == "open", "open")

    async def generated(self) -> int:
        """Tokens that this life has made."""
        path = self.scripted.run_dir / f"engine-{self.scripted.generation}.sock"
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            health = await Connection(reader, writer).ask("GET", "/health")
        finally:
            writer.close()
        return int(health.json().get("progress", 0))  # while it loads, it says only that

    async def crash(self) -> None:
        """Kill -9, and the incident that it becomes."""
        await self.scripted.crash(incident_id=f"inc-{self.scripted.generation}")

    @contextlib.asynccontextmanager
    async def asked(self, path: str, body: Json) -> AsyncIterator[Reader]:
        """A stream whose head has come."""
        async with self.gateway.connection() as connection:
            connection.send("POST", path, body)
            status, headers = await connection.head()
            assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
            yield Reader(connection)


class Reader:
    """A stream as it comes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.raw = b""

    @property
    def events(self) -> list[Any]:
        """What came so far."""
        return events_in(self.raw)

    async def events_until(self, count: int) -> None:
        """At least so many events."""
        while len(self.events) < count:
            self.raw += await asyncio.wait_for(self.connection.chunk(), 20)

    async def rest(self) -> list[Any]:
        """To the end."""
        while part := await asyncio.wait_for(self.connection.chunk(), 20):
            self.raw += part
        return self.events


def events_in(raw: bytes) -> list[Any]:
    """[DONE] as a string."""
    datas = [block[6:] for block in raw.decode("utf-8", "ignore").split("\n\n")[:-1] if block.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


@contextlib.asynccontextmanager
async def engines_that_note(run_dir: Path) -> AsyncIterator[Appliance]:
    """The first one serves."""
    model = byte_level_folder(run_dir / "model")
    async with appliance(run_dir, engine=False) as (gateway, scripted):
        one = Appliance(gateway, scripted, model)
        await one.start()
        yield one


def plain(event: Any) -> Any:
    """Without what two runs may have different."""
    return {name: value for name, value in event.items() if name not in ("id", "created")} if isinstance(event, dict) else event


def shown(events: list[Any]) -> Json:
    """What a client makes of a stream: its text, and everything else in order."""
    text, others = "", []
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        piece = (choices[0].get("text") or choices[0].get("delta", {}).get("content")) if choices else None
        if piece:
            text += piece
        else:
            others.append(plain(event))
    return {"text": text, "others": others, "ids": len({event["id"] for event in events if isinstance(event, dict) and "id" in event})}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAM),
        ("/v1/completions", {"prompt": "Ein いろは Test. ", "max_tokens": 60, "ignore_eos": True, "stream": True, "stop": "no such words"}),
    ],
)
async def test_a_stream_goes_on_over_three_crashes_as_if_nothing_had_happened(run_dir: Path, path: str, body: Json) -> None:
    """The same text, one role, one id, one finish reason, the same usage; the client is told by comments only."""
    async with engines_that_note(run_dir) as by_ids, by_ids.asked(path, body) as reader:
        for count in (10, 20, 30):
            await reader.events_until(count)
            await by_ids.crash()
            await by_ids.start()
        events = await reader.rest()
        status = await by_ids.gateway.status()
        undisturbed = (await by_ids.gateway.post(body, path)).body
    assert shown(events) == shown(events_in(undisturbed))
    assert reader.raw.count(RESTARTING) >= 3  # said again in every silence of 5 s, which a restart takes on a busy machine
    assert b":ids" not in reader.raw + undisturbed
    assert status["totals"]["upstream_losses"]["reset"] == 3


@pytest.mark.parametrize("sampled", [False, True])
async def test_several_answers_are_said_again_and_what_was_sent_is_swallowed(run_dir: Path, sampled: bool) -> None:
    """Of n answers the engine notes nothing: a greedy stream is compared, a sampled one ends in an error; nothing is said twice."""
    body = STREAM | {"n": 2, "temperature": 0.9 if sampled else 0}
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/v1/chat/completions", body) as reader:
        await reader.events_until(20)
        await by_ids.crash()
        await by_ids.start()
        events = await reader.rest()
        undisturbed = events_in((await by_ids.gateway.post(body)).body)
    if sampled:
        assert events[-1]["error"]["code"] == "engine_lost"
        return
    for index in (0, 1):
        assert text_of_choice(events, index) == text_of_choice(undisturbed, index)
    assert events[-2]["usage"] == undisturbed[-2]["usage"]
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1


def text_of_choice(events: list[Any], index: int) -> str:
    """One of several answers."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


async def test_sglangs_stream_that_repeats_all_so_far_goes_on_too(run_dir: Path) -> None:
    """/generate: each event has the whole text, each longer than the one before."""
    body = {"text": "Ein いろは Test. ", "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/generate", body) as reader:
        await reader.events_until(10)
        await by_ids.crash()
        await by_ids.start()
        events = (await reader.rest())[:-1]
    assert [len(event["output_ids"]) for event in events] == sorted(len(event["output_ids"]) for event in events)
    assert all(after["text"].startswith(before["text"]) for before, after in itertools.pairwise(events))
    assert len({event["meta_info"]["id"] for event in events}) == 1
    assert (len(events[-1]["output_ids"]), events[-1]["meta_info"]["finish_reason"]["type"]) == (60, "length")


async def test_an_answer_without_a_stream_goes_on_where_it_was(run_dir: Path) -> None:
    """It is not generated again from its start: the next engine makes only what is missing."""
    body = CHAT | {"max_tokens": 100}
    async with engines_that_note(run_dir) as by_ids:
        asked = asyncio.ensure_future(by_ids.gateway.post(body))
        while await by_ids.generated() < 60:
            await asyncio.sleep(0.01)
        await by_ids.crash()
        await by_ids.start()
        answer = await asked
        made_again = await by_ids.generated()
        undisturbed = await by_ids.gateway.post(body)
    assert plain(answer.json()) == plain(undisturbed.json())
    assert made_again <= 100 - 60 + 0.25 / STEP_S + 10  # notes come every quarter of a second
    assert answer.headers["content-type"] == "application/json"


async def test_a_hang_ends_with_the_next_generation(run_dir: Path) -> None:
    """SIGSTOP: nothing breaks, nothing comes; the supervisor publishes a new life."""
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/v1/chat/completions", STREAM) as reader:
        await reader.events_until(10)
        old = by_ids.scripted.engine
        assert old is not None
        old.send_signal(signal.SIGSTOP)
        try:
            by_ids.scripted.say(EngineState.BACKOFF, "the engine hangs", incident_id="inc-1")
            await by_ids.start()
            events = await reader.rest()
        finally:
            old.kill()
            await old.wait()
        assert shown(events) == shown(events_in((await by_ids.gateway.post(STREAM)).body))


async def test_a_restart_that_was_asked_for_blames_nobody(run_dir: Path) -> None:
    """DRAINING, then the process is stopped under what still runs: three times, and the stream is not even suspected."""
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/v1/chat/completions", STREAM) as reader:
        await reader.events_until(10)
        for _ in range(3):
            endpoint = by_ids.scripted.board.current.endpoint
            by_ids.scripted.say(EngineState.DRAINING, "a restart was asked for", endpoint=endpoint)
            await by_ids.gateway.until(lambda status: status["standing"] == "hold", "held")
            await by_ids.crash()
            await by_ids.start()
        events = await reader.rest()
    assert events[-1] == "[DONE]"
    assert "tried alone" not in by_ids.gateway.log.read_text()


async def test_a_context_that_became_too_small_is_an_error_with_both_numbers(run_dir: Path) -> None:
    """A safer rung: what the engine says goes into the stream."""
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/v1/chat/completions", STREAM) as reader:
        await reader.events_until(10)
        await by_ids.crash()
        await by_ids.start("--context", "64")
        events = await reader.rest()
    error = events[-1]["error"]
    assert error["code"] == "context_length_exceeded"
    assert "context of 64 tokens" in error["message"]
    assert "max_tokens=60" in error["message"]
    assert "[DONE]" not in events


async def test_clients_cannot_ask_for_notes_nor_bring_any(run_dir: Path) -> None:
    """The gateway's own header means nothing from outside."""
    async with engines_that_note(run_dir) as by_ids, by_ids.gateway.connection() as connection:
        answer = await connection.ask("POST", "/v1/chat/completions", CHAT, x_appliance_resume="5")
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 60


async def test_waiting_for_the_engine_is_kept_alive(run_dir: Path) -> None:
    """A stream that has begun gets a comment at once and then every few seconds, for as long as the engine is away."""
    async with engines_that_note(run_dir) as by_ids, by_ids.asked("/v1/chat/completions", STREAM) as reader:
        await reader.events_until(5)
        await by_ids.crash()
        began = time.monotonic()

        async def comments(count: int) -> float:
            while reader.raw.count(RESTARTING) < count:
                reader.raw += await asyncio.wait_for(reader.connection.chunk(), 20)
            return time.monotonic() - began

        assert await comments(1) < 1.0
        assert 4.0 < await comments(2) < 7.0
        await by_ids.start()
        assert (await reader.rest())[-1] == "[DONE]"
        reports = by_ids.scripted.reports
        await eventually(lambda: any(one["resumability"] == "continue" for report in reports for one in report["requests"]), "reported")


# engines that cannot go on behind a point

GREEDY = {"do": "stream", "stream": True, "events": 30, "gap_s": 0.03, "role": True, "temperature": 0}


def content(answer: Answer) -> str:
    """The text of a stream."""
    events = [json.loads(data) for data in answer.events() if data != "[DONE]"]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if "choices" in event)


async def begun(gateway: GatewayProcess, body: Json) -> asyncio.Future[Answer]:
    """A stream of which the client has several events."""
    asked = asyncio.ensure_future(gateway.post(body))
    await gateway.until(lambda status: any(one["sent_bytes"] > 500 for one in status["inflight"]), "begun")
    return asked


async def test_a_deterministic_stream_is_answered_again_and_what_was_sent_is_swallowed(run_dir: Path) -> None:
    """Any engine with OpenAI's events: the client sees each of them once."""
    async with appliance(run_dir) as (gateway, scripted):
        undisturbed = await gateway.post(GREEDY)
        asked = await begun(gateway, GREEDY)
        await scripted.crash()
        await scripted.start_engine()
        answer = await asked
    assert content(answer) == content(undisturbed)
    assert len(events_in(answer.body)) == len(events_in(undisturbed.body))
    assert answer.body.count(b'"role"') == 1
    assert RESTARTING in answer.body


async def test_an_engine_that_answers_differently_is_an_error_that_says_so(run_dir: Path) -> None:
    """The client keeps what it has, and hears that the rest would not belong to it."""
    async with appliance(run_dir) as (gateway, scripted):
        asked = await begun(gateway, GREEDY)
        await scripted.crash()
        await scripted.start_engine("--says", "u")
        answer = await asked
    error = json.loads(answer.events()[-1])["error"]
    assert error["code"] == "answer_diverged"
    assert " t0 " in error["message"]
    assert " u0 " in error["message"]
    assert "[DONE]" not in answer.events()


async def test_a_stream_that_could_come_out_otherwise_is_not_tried_again(run_dir: Path) -> None:
    """Neither temperature 0 nor a seed: the error says that this is why."""
    async with appliance(run_dir) as (gateway, scripted):
        asked = await begun(gateway, {**GREEDY, "temperature": 0.7})
        await scripted.crash(incident_id="inc-9")
        answer = await asked
    error = json.loads(answer.events()[-1])["error"]
    assert (error["code"], error["incident_id"]) == ("engine_lost", "inc-9")
    assert "neither temperature 0 nor a seed" in error["message"]


async def test_what_one_engine_did_not_note_the_next_one_cannot_go_on_behind(run_dir: Path) -> None:
    """A stream of an engine that notes nothing goes on by comparison, even where the next engine would take ids."""
    async with appliance(run_dir) as (gateway, scripted):
        asked = await begun(gateway, GREEDY)
        await scripted.crash()
        await scripted.start_engine(publish=False)
        scripted.serve(BY_IDS)
        assert content(await asked).endswith(" t29 xxxxxxxx")
