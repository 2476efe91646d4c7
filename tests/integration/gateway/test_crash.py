"""A crash of the engine is a pause: what was not answered yet is answered by the next life, what was is ended honestly."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import Answer, GatewayProcess, appliance, eventually, gateway

CHAT = "/v1/chat/completions"
TOO_LONG = '{"detail": "too long"}'
ANTHROPIC_ERROR = b'event: error\ndata: {"type": "error", "error": {'
RESPONSES_ERROR = b'event: error\ndata: {"type": "error", "message": '


async def _in_flight(running: GatewayProcess, count: int) -> None:
    await running.until(lambda status: status["slots"]["in_use"] == count, f"{count} with the engine")


async def _held(running: GatewayProcess, count: int) -> None:
    await running.until(lambda status: status["queue"]["length"] == count, f"{count} held")


async def test_requests_without_an_answer_are_given_to_the_next_life(run_dir: Path) -> None:
    """Eight in flight, kill -9, a new engine: eight answers, and applianced is told who was in flight."""
    async with appliance(run_dir) as (running, scripted):
        asked = [asyncio.ensure_future(running.post({"do": "whole", "delay_s": 0.3, "n": n})) for n in range(8)]
        await _in_flight(running, 8)
        await scripted.crash()
        await _held(running, 8)
        await scripted.start_engine()
        answers = await asyncio.gather(*asked)
        status = await running.status()
    assert [answer.status for answer in answers] == [200] * 8
    assert status["totals"]["resent"] == 8
    report = scripted.reports[0]
    assert report["kind"] == "upstream_lost"
    assert len(report["requests"]) == 8
    shape = report["requests"][0]
    assert (shape["path"], shape["generation"], shape["attempt"], shape["resumability"]) == (CHAT, 1, 1, "replay")
    assert len({shape["fingerprint"] for shape in report["requests"]}) == 8
    assert "delay_s" not in json.dumps(scripted.reports)


async def test_a_whole_answer_cut_in_half_is_replayed(run_dir: Path) -> None:
    """The client sees one whole answer and nothing of the first half of the other."""
    async with appliance(run_dir) as (running, scripted):
        asked = asyncio.ensure_future(running.post({"do": "die", "bytes": 3000, "after_bytes": 1500}))
        assert scripted.engine is not None
        await scripted.engine.wait()
        scripted.say(EngineState.BACKOFF, "the engine died")
        await scripted.start_engine("--health", "200")
        # The next life is given the same body and dies too, and the next one of it alone: then it is refused.
        assert scripted.engine is not None
        await scripted.engine.wait()
        scripted.say(EngineState.BACKOFF, "the engine died again", incident_id="inc-2")
        await scripted.start_engine()
        await scripted.engine.wait()
        scripted.say(EngineState.BACKOFF, "the engine died a third time", incident_id="inc-3")
        answer = await asked
    assert answer.status == 500
    error = answer.error()
    assert (error["code"], error["incident_id"]) == ("request_quarantined", "inc-3")
    assert "3 engines died in a row" in error["message"]


async def test_a_stream_that_has_only_its_role_is_replayed(run_dir: Path) -> None:
    """The role event is held back until there is an answer, so a crash in the prefill costs nothing."""
    body = {"do": "stream", "stream": True, "events": 3, "gap_s": 0.4, "role": True}
    async with appliance(run_dir) as (running, scripted):
        asked = asyncio.ensure_future(running.post(body))
        await _in_flight(running, 1)
        await scripted.crash()
        await scripted.start_engine()
        answer = await asked
    assert answer.complete
    assert len(answer.events()) == 5
    assert answer.body.count(b'"role"') == 1


async def test_a_stream_that_has_begun_ends_with_an_error_event(run_dir: Path) -> None:
    """With the sentence and the incident, on a whole event, and never with [DONE]."""
    async with appliance(run_dir) as (running, scripted), running.connection() as connection:
        connection.send("POST", CHAT, {"do": "stream", "stream": True, "events": 100, "gap_s": 0.05})
        await connection.head()
        assert b" t0 " in await connection.chunk()
        await scripted.crash(reason="the engine died of SIGKILL", incident_id="inc-7")
        rest = b""
        while part := await connection.chunk():
            rest += part
    events = [event for event in rest.decode().split("\n\n") if event]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["incident_id"]) == ("engine_lost", "inc-7")
    assert "the engine died of SIGKILL" in error["message"]
    assert b"[DONE]" not in rest
    assert all(json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.parametrize(("path", "ending"), [("/v1/messages", ANTHROPIC_ERROR), ("/v1/responses", RESPONSES_ERROR)])
async def test_each_api_gets_its_own_kind_of_error_event(run_dir: Path, path: str, ending: bytes) -> None:
    """Anthropic's and OpenAI's Responses are not chat completions."""
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "stream", "stream": True, "events": 2, "done": False}, path)
    assert ending in answer.body
    assert answer.complete


async def test_a_stream_that_ends_without_its_last_event_is_no_complete_stream(run_dir: Path) -> None:
    """Proper HTTP, no [DONE]: the client is told."""
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "stream", "stream": True, "events": 5, "done": False})
        status = await running.status()
    assert json.loads(answer.events()[-1])["error"]["code"] == "engine_lost"
    assert status["totals"]["upstream_losses"] == {"truncated": 1}


@pytest.mark.parametrize(
    "raw",
    [
        "what is this?\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
        'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"half": ',
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz",
        "HTTP/1.1 200 OK\r\ncontent-length: abc\r\n\r\n",
        "HTTP/1.1 200",
        "",
    ],
)
async def test_an_engine_that_lives_and_breaks_each_answer_is_given_up_soon(run_dir: Path, raw: str) -> None:
    """It proves itself on /health after each loss, so the request is tried again, max_attempts times, and not for ever."""
    async with appliance(run_dir) as (running, _):
        began = time.monotonic()
        answer = await running.post({"do": "raw", "text": raw, "close": True})
        status = await running.status()
        assert time.monotonic() - began < 5
        assert (await running.post({"do": "whole"})).status == 200
    assert (answer.status, answer.error()["code"]) == (503, "engine_lost_repeatedly")
    assert status["totals"]["resent"] == 2
    assert status["slots"]["in_use"] == 0


async def test_an_answer_without_a_length_ends_with_its_connection(run_dir: Path) -> None:
    """HTTP/1.0 style: whole JSON is taken as complete."""
    raw = 'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"whole": 1}'
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "raw", "text": raw, "close": True})
    assert answer.json() == {"whole": 1}


async def test_informational_answers_are_passed_over(run_dir: Path) -> None:
    """103 Early Hints before the real one."""
    raw = "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "raw", "text": raw})
    assert (answer.status, answer.body) == (200, b"{}")
    assert "link" not in answer.headers


async def test_a_second_answer_nobody_asked_for_reaches_nobody(run_dir: Path) -> None:
    """The connection it came on is not used again."""
    raw = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"
    async with appliance(run_dir) as (running, _):
        for _ in range(5):
            assert (await running.post({"do": "raw", "text": raw})).body == b"{}"
            assert b"poison" not in (await running.post({"do": "whole"})).body


async def test_a_kept_connection_that_the_engine_closed_costs_nothing(run_dir: Path) -> None:
    """A server may close an idle connection at any moment; that is no loss of the engine."""
    closing = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    async with appliance(run_dir) as (running, _):
        for _ in range(20):
            assert (await running.post({"do": "raw", "text": closing, "close": True})).status == 200
        status = await running.status()
    assert status["totals"]["upstream_losses"] == {}


async def test_an_engine_that_says_it_is_loading_is_waited_for(run_dir: Path) -> None:
    """503 "loading" is not an answer; 503 "queue full" is."""
    async with appliance(run_dir) as (running, _):
        full = await running.post({"do": "whole", "status": 503, "body": '{"error": {"message": "The request queue is full."}}'})
        asked = asyncio.ensure_future(running.post({"do": "whole", "status": 503, "body": '{"status": "loading"}'}))
        await running.until(lambda status: status["totals"]["upstream_losses"].get("not_ready", 0) >= 2, "asked again")
        assert not asked.done()
        asked.cancel()
    assert full.status == 503
    assert "queue is full" in full.error()["message"]


async def test_requests_that_come_while_there_is_no_engine_wait_for_it(run_dir: Path) -> None:
    """Posts and gets alike."""
    async with appliance(run_dir, engine=False) as (running, scripted):
        asked = [asyncio.ensure_future(running.post({"do": "whole"})) for _ in range(20)]
        asked.append(asyncio.ensure_future(running.ask("GET", "/v1/models")))
        await _held(running, 20)
        health = await running.ask("GET", "/health")
        assert (health.status, health.headers["retry-after"]) == (503, "3")
        assert health.error()["message"] == "the engine is being planned"
        await scripted.start_engine()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_held_too_long_is_refused_with_the_published_reason(run_dir: Path) -> None:
    """After [resume] max_wait_s: 503 with Retry-After, the sentence and the incident."""
    async with appliance(run_dir, "resume.max_wait_s=0.3") as (running, scripted):
        asked = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 5}))
        await _in_flight(running, 1)
        await scripted.crash(reason="the card fell off the bus", incident_id="inc-79")
        fresh = await running.post({"do": "whole"})
        lost = await asked
    for answer in (lost, fresh):
        assert answer.status == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.error()["message"] == "the card fell off the bus"
        assert answer.error()["incident_id"] == "inc-79"


async def test_parked_is_refused_at_once(run_dir: Path) -> None:
    """Those who wait and those who come; a person is needed, so there is no Retry-After."""
    async with appliance(run_dir, engine=False) as (running, scripted):
        waiting = asyncio.ensure_future(running.post({"do": "whole"}))
        await _held(running, 1)
        scripted.say(EngineState.PARKED, "3 starts failed; see appliancectl diagnose", retry_after_s=None, incident_id="inc-9")
        waited = await waiting
        fresh = await running.post({"do": "stream", "stream": True})
        health = await running.ask("GET", "/health")
    for answer in (waited, fresh, health):
        assert answer.status == 503
        assert "retry-after" not in answer.headers
        assert (answer.error()["code"], answer.error()["incident_id"]) == ("engine_parked", "inc-9")


async def test_a_restart_that_was_asked_for_is_waited_over(run_dir: Path) -> None:
    """DRAINING lets what runs finish and holds what comes; STOPPED and a new applianced follow."""
    async with appliance(run_dir) as (running, scripted):
        runs = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 0.4}))
        await _in_flight(running, 1)
        path = scripted.board.current.endpoint
        scripted.say(EngineState.DRAINING, "a restart was asked for", endpoint=path)
        await running.until(lambda status: status["standing"] == "hold", "held")
        comes = asyncio.ensure_future(running.post({"do": "whole"}))
        assert (await runs).status == 200
        scripted.kill_engine()
        scripted.say(EngineState.STOPPED, "stopped on request")
        await scripted.hang_up()
        await scripted.listen()
        await scripted.start_engine()
        assert (await comes).status == 200


async def test_a_life_that_ended_without_closing_its_sockets_is_given_up(run_dir: Path) -> None:
    """A process that cannot be killed keeps its connections open; the next generation makes them void."""
    async with appliance(run_dir) as (running, scripted):
        old = scripted.engine
        asked = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 2.5, "body": '{"from": "either"}'}))
        await _in_flight(running, 1)
        assert old is not None
        old.send_signal(19)  # SIGSTOP: alive, silent
        try:
            await scripted.start_engine()
            answer = await asked
            status = await running.status()
        finally:
            old.kill()
            await old.wait()
    assert answer.status == 200
    assert status["totals"]["upstream_losses"] == {"superseded": 1}
    assert [report["kind"] for report in scripted.reports] == ["upstream_lost"]  # though applianced said it before a socket did


async def test_while_applianced_is_away_the_engine_serves_on(run_dir: Path) -> None:
    """The last publication counts; when the engine goes too, both are said; when both are back, all is answered."""
    async with appliance(run_dir) as (running, scripted):
        await scripted.hang_up()
        await running.until(lambda status: not status["applianced_connected"], "noticed")
        assert (await running.post({"do": "whole"})).status == 200
        scripted.kill_engine()
        health = await _until_health(running, 503)
        assert health.error()["message"].startswith("applianced is not answering")
        asked = asyncio.ensure_future(running.post({"do": "whole"}))
        await _held(running, 1)
        scripted.generation = 0  # a new applianced counts from the start again
        await scripted.listen()
        await scripted.start_engine()
        assert (await asked).status == 200
        assert (await _until_health(running, 200)).status == 200


async def test_a_gateway_that_starts_alone_answers_and_says_why_it_cannot_serve(run_dir: Path) -> None:
    """No control socket, no engine."""
    async with gateway(run_dir) as running:
        health = await running.ask("GET", "/health")
    assert health.status == 503
    assert "applianced is not answering: nobody listens on" in health.error()["message"]
    assert health.headers["retry-after"] == "5"


async def test_twenty_kills_under_eight_clients_lose_nothing(run_dir: Path) -> None:
    """The engine is killed whenever all eight are in flight; every request of every client is answered once, with its own answer."""
    async with appliance(run_dir) as (running, scripted):
        stop, answered = asyncio.Event(), []

        async def client(number: int) -> list[Answer]:
            answers = []
            async with running.connection() as connection:
                turn = 0
                while not stop.is_set():
                    said = f'{{"client": {number}, "turn": {turn}}}'
                    answers.append(await connection.ask("POST", CHAT, {"do": "whole", "delay_s": 0.05, "body": said}))
                    assert answers[-1].body.decode() == said
                    answered.append(turn)
                    turn += 1
            return answers

        clients = [asyncio.ensure_future(client(number)) for number in range(8)]
        for kill in range(20):
            # After some answers, or the same eight would lose three engines in a row, which is refused by design.
            await eventually(lambda kill=kill: len(answered) >= 10 * (kill + 1), "answers go on")
            await running.until(lambda status: status["slots"]["in_use"] >= 6, "under load")
            await scripted.crash()
            await scripted.start_engine()
        await running.until(lambda status: status["slots"]["in_use"] >= 1, "served again")
        stop.set()
        results = await asyncio.gather(*clients)
        status = await running.status()
    assert {answer.status for answers in results for answer in answers} == {200}
    assert status["totals"]["resent"] >= 20
    assert sum(report["kind"] == "upstream_lost" for report in scripted.reports) == 20


async def test_a_long_wait_is_filled_with_comments(run_dir: Path) -> None:
    """A stream without a byte for 5 s gets its head and `: waiting`; what follows is the whole stream, or an error event."""
    async with appliance(run_dir) as (running, _):
        good = asyncio.ensure_future(running.post({"do": "stream", "stream": True, "events": 2, "delay_s": 5.6}))
        whole = asyncio.ensure_future(running.post({"do": "whole", "stream": True, "delay_s": 5.6}))
        bad = asyncio.ensure_future(running.post({"do": "whole", "stream": True, "delay_s": 5.6, "status": 400, "body": TOO_LONG}))
        answers = await asyncio.gather(good, whole, bad)
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.body.startswith(b": waiting\n\n")
    assert [len(answer.events()) for answer in answers] == [3, 2, 1]
    assert answers[1].events()[-1] == "[DONE]"
    assert json.loads(answers[2].events()[0])["error"]["message"] == "too long"


async def test_a_client_that_reads_by_hand_is_kept_waiting_with_empty_lines(run_dir: Path) -> None:
    """What is written with aiohttp (vLLM's and SGLang's load generators) loses events over a comment: neither a long wait nor a crash
    gives it one. An answer has its events and nothing else."""
    by_hand = "Python/3.11 aiohttp/3.13.2"
    body = {"do": "stream", "stream": True, "events": 3, "gap_s": 0.3, "delay_s": 5.6, "temperature": 0}
    async with appliance(run_dir) as (running, scripted):
        asked = asyncio.ensure_future(running.ask("POST", "/v1/chat/completions", body, user_agent=by_hand))
        await _in_flight(running, 1)
        await asyncio.sleep(5.3)  # it has been told that it waits
        await scripted.crash()
        await scripted.start_engine()
        answer = await asked
    assert answer.status == 200
    assert answer.body.startswith(b"\n\n")
    assert [line for line in answer.body.split(b"\n") if line and not line.startswith(b"data: ")] == []
    assert len(answer.events()) == 4


async def _until_health(running: GatewayProcess, status: int) -> Answer:
    due_s = time.monotonic() + 20
    while (answer := await running.ask("GET", "/health")).status != status:
        assert time.monotonic() < due_s, answer.body
        await asyncio.sleep(0.02)
    return answer


async def test_the_last_words_of_an_engine_that_dies_are_not_for_its_client(run_dir: Path) -> None:
    """vLLM tells its clients of an error before it ends: the request goes to the next life. One that lives has its error passed on."""
    words = json.dumps({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}})
    async with appliance(run_dir) as (running, scripted):
        dying = asyncio.ensure_future(running.post({"do": "whole", "status": 500, "body": words, "delay_s": 0.3}))
        await _in_flight(running, 1)
        await asyncio.sleep(0.5)  # it has said them, and is not dead yet
        assert not dying.done()
        await scripted.crash()
        await scripted.start_engine()
        second = await dying
        began_s = time.monotonic()
        living = await running.post({"do": "whole", "status": 500, "body": words})
    assert second.status == living.status == 500  # the next life says it too, and lives on
    assert "EngineCore" in living.body.decode()
    assert 1.5 < time.monotonic() - began_s < 10
    assert scripted.reports[0]["kind"] == "upstream_lost"
