"""What goes through the gateway goes through unchanged."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from appliance.core.launch import Endpoint
from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import Connection, appliance, free_port

CHAT = "/v1/chat/completions"


async def test_a_whole_answer_arrives_as_the_engine_sent_it(run_dir: Path) -> None:
    """Status, type and every byte of the body."""
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "whole", "bytes": 5000})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": "x" * 5000}
    assert answer.headers["content-length"] == str(len(answer.body))


async def test_a_stream_arrives_byte_for_byte_as_the_engine_sent_it(run_dir: Path) -> None:
    """Nothing is re-encoded, also not the role event that is held back until there is an answer."""
    asked = {"do": "stream", "stream": True, "events": 300, "role": True}
    async with appliance(run_dir) as (running, scripted):
        through = await running.post(asked)
        reader, writer = await asyncio.open_unix_connection(str(run_dir / f"engine-{scripted.generation}.sock"))
        direct = await Connection(reader, writer).ask("POST", CHAT, asked)
        writer.close()
    assert through.headers["content-type"] == "text/event-stream"
    assert through.body == direct.body
    assert through.events()[-1] == "[DONE]"
    assert through.complete


async def test_a_stream_of_an_unknown_endpoint_passes_as_it_comes(run_dir: Path) -> None:
    """Also without `"stream": true` and without [DONE]: what is complete as HTTP is complete."""
    asked = {"do": "stream", "events": 4, "done": False}
    async with appliance(run_dir) as (running, _):
        answer = await running.post(asked, "/v1/threads/runs")
        status = await running.status()
    assert len(answer.events()) == 4
    assert b"error" not in answer.body
    assert answer.headers["x-accel-buffering"] == "no"
    assert status["totals"]["upstream_losses"] == {}


async def test_events_come_when_they_are_made(run_dir: Path) -> None:
    """The first is with the client long before the last is made."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        connection.send("POST", CHAT, {"do": "stream", "stream": True, "events": 3, "gap_s": 0.5})
        await connection.head()
        first = await connection.chunk()
    assert b" t0 " in first
    assert b" t1 " not in first


async def test_request_headers_that_belong_to_the_connection_stay_behind(run_dir: Path) -> None:
    """Hop-by-hop headers, those that Connection names, and accept-encoding; the rest and our id go on."""
    async with appliance(run_dir) as (running, _):
        answer = await running.ask(
            "POST",
            CHAT + "?trace=1&x=%20",
            {"do": "whole", "echo": True},
            connection="keep-alive, x-secret-hop",
            x_secret_hop="1",
            te="trailers",
            accept_encoding="gzip",
            authorization="Bearer abc",
            x_custom="kept",
        )
    seen = answer.body.decode()
    assert seen.startswith("post /v1/chat/completions?trace=1&x=%20 http/1.1")
    for gone in ("x-secret-hop", "te: ", "accept-encoding", "connection:"):
        assert gone not in seen
    assert "authorization: bearer abc" in seen
    assert "x-custom: kept" in seen
    assert f"x-request-id: {answer.headers['x-request-id']}" in seen


@pytest.mark.parametrize(("given", "kept"), [("trace-42:a.b_c", True), ("has space", False), ("x" * 129, False), ("ümlaut", False)])
async def test_a_request_id_of_the_client_is_kept_when_it_may_stand_in_a_log(run_dir: Path, given: str, kept: bool) -> None:
    """In and out the same; anything else is replaced by one of ours."""
    async with appliance(run_dir, engine=False) as (running, _):
        answer = await running.ask("GET", "/health", x_request_id=given)
    assert (answer.headers["x-request-id"] == given) is kept
    assert kept or answer.headers["x-request-id"].startswith("req-")


async def test_a_body_of_ten_megabytes_passes(run_dir: Path) -> None:
    """And the engine is given all of it."""
    async with appliance(run_dir) as (running, _):
        body = json.dumps({"do": "whole", "echo": True, "filler": "y" * 10_000_000}).encode()
        answer = await running.ask("POST", CHAT, body)
        status = await running.status()
    assert answer.status == 200
    assert f"content-length: {len(body)}" in answer.body.decode()
    assert status["inflight"] == []


async def test_an_answer_too_long_to_hold_passes_too(run_dir: Path) -> None:
    """Over 8 MiB it is passed on while it comes."""
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "whole", "bytes": 20_000_000})
    assert answer.complete
    assert len(answer.json()["text"]) == 20_000_000


async def test_head_has_the_length_and_no_body(run_dir: Path) -> None:
    """HEAD is answered as GET would be, without its body, and the connection can be used on."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        head = await connection.ask("HEAD", "/v1/models")
        get = await connection.ask("GET", "/v1/models")
    assert head.status == get.status == 200
    assert head.headers["content-length"] == str(len(get.body))


async def test_an_engine_on_a_loopback_port_is_served_like_one_on_a_socket(run_dir: Path) -> None:
    """Both kinds of endpoint."""
    port = free_port()
    async with appliance(run_dir, engine=False) as (running, scripted):
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "tests/fakes/upstream.py", "--port", str(port), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert engine.stdout is not None
            await engine.stdout.readline()
            scripted.generation = 1
            scripted.say(EngineState.SERVING, "serving", endpoint=Endpoint(port=port))
            await running.until(lambda status: status["standing"] == "open", "open")
            assert (await running.post({"do": "whole"})).status == 200
        finally:
            engine.kill()
            await engine.wait()


async def test_an_engine_error_in_the_envelope_is_untouched(run_dir: Path) -> None:
    """Whatever else it holds."""
    said = '{"error": {"message": "no such model", "type": "x", "param": "model", "code": "model_not_found", "more": [1]}}'
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "whole", "status": 404, "body": said})
    assert answer.status == 404
    assert answer.body.decode() == said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"object": "error", "message": "prompt too long", "code": 400}', "prompt too long"),
        ('{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        ("plain words", "plain words"),
        ("", "without a body"),
    ],
)
async def test_an_engine_error_of_another_form_is_put_into_the_envelope(run_dir: Path, said: str, message: str) -> None:
    """FastAPI's, SGLang's, plain text, nothing."""
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "whole", "status": 422, "body": said, "type": "text/plain"})
    assert answer.status == 422
    assert message in answer.error()["message"]
    assert answer.headers["content-type"] == "application/json"


async def test_cross_origin_access_stays_off_whatever_the_engine_says(run_dir: Path) -> None:
    """An engine's own "*" would open it to every web page."""
    raw = "HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 2\r\n\r\n{}"
    async with appliance(run_dir) as (running, _):
        answer = await running.post({"do": "raw", "text": raw})
        preflight = await running.ask("OPTIONS", CHAT, origin="https://evil.example")
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers
    assert preflight.status == 405


async def test_the_slots_follow_the_published_limit(run_dir: Path) -> None:
    """`max_concurrent_decodes` 0 means what the engine says, now."""
    async with appliance(run_dir, max_running=3) as (running, scripted):
        assert (await running.status())["slots"]["capacity"] == 3
        scripted.serve(replace(scripted.limits, max_running=5))
        await running.until(lambda status: status["slots"]["capacity"] == 5, "five slots")


async def test_the_pages_say_what_is(run_dir: Path) -> None:
    """/health, /status, /metrics and / while it serves."""
    async with appliance(run_dir) as (running, _):
        await running.post({"do": "stream", "stream": True, "events": 2})
        health = await running.ask("GET", "/health")
        status = await running.status()
        metrics = (await running.ask("GET", "/metrics")).body.decode()
        front = await running.ask("GET", "/")
    assert (health.status, health.json()["status"]) == (200, "ok")
    assert status["publication"]["limits"]["model_id"] == "fake"
    assert status["totals"]["requests"]["200"] >= 2
    assert 'appliance_requests_total{code="200",endpoint="/v1/chat/completions"} 1.0' in metrics
    assert "appliance_time_to_first_token_seconds_count 1.0" in metrics
    assert 'appliance_engine_state{state="serving"} 1.0' in metrics
    assert b"/v1/chat/completions" in front.body


async def test_metrics_can_be_switched_off(run_dir: Path) -> None:
    """[metrics] enabled = false."""
    async with appliance(run_dir, "metrics.enabled=false", engine=False) as (running, _):
        assert (await running.ask("GET", "/metrics")).error()["code"] == "metrics_off"


async def test_two_thousand_requests_leave_nothing_behind(run_dir: Path) -> None:
    """No slot, no body, no request in the table; memory does not grow with their number."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        process = psutil.Process(running.process.pid)
        for _ in range(500):
            await connection.ask("POST", CHAT, {"do": "whole"})
        before_bytes = process.memory_info().rss
        for _ in range(1500):
            await connection.ask("POST", CHAT, {"do": "whole"})
        status = await running.status()
        grown_bytes = process.memory_info().rss - before_bytes
    assert (status["slots"]["in_use"], status["inflight"]) == (0, [])
    assert grown_bytes < 2 * 1024**2
