"""Another endpoint in our place: when, what it gets to see, and what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import ROOT, Answer, GatewayProcess, ScriptedAppliance, appliance, eventually, free_port, gateway
from tests.integration.gateway.test_keys import bearer, keys_file
from tests.integration.gateway.test_tls import certificate, needs_openssl

CHAT = "/v1/chat/completions"
MARK = "x-appliance-fallback"


@contextlib.asynccontextmanager
async def other_endpoint() -> AsyncIterator[int]:
    """The fake upstream as a stranger on a port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "tests/fakes/upstream.py"), "--port", str(port), stdout=asyncio.subprocess.DEVNULL
    )
    due_s = asyncio.get_running_loop().time() + 15
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            assert asyncio.get_running_loop().time() < due_s
            await asyncio.sleep(0.02)
    try:
        yield port
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def with_fallback(run_dir: Path, *settings: str, **given: Any) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance]]:
    """A gateway whose fallback is the other endpoint, by a key of its own."""
    (run_dir / "key").write_text("sk-for-the-other-one\n")
    async with other_endpoint() as port:
        named = (f"fallback.base_url=http://127.0.0.1:{port}/api/v1", f"fallback.api_key_file={run_dir / 'key'}", *settings)
        async with appliance(run_dir, *named, **given) as (running, scripted):
            yield running, scripted


async def parked(running: GatewayProcess, scripted: ScriptedAppliance) -> None:
    """A person is needed."""
    scripted.say(EngineState.PARKED, "three crashes in a row", retry_after_s=None)
    await eventually(lambda: b"refuse:" in running.log.read_bytes(), "parked")


async def outcomes(running: GatewayProcess, **headers: str) -> dict[str, int]:
    """The metric."""
    page = (await running.ask("GET", "/metrics", **headers)).body.decode()
    lines = [line for line in page.splitlines() if line.startswith("appliance_fallback_requests_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


async def test_while_parked_requests_go_there_and_say_so(run_dir: Path) -> None:
    """Whole and streamed, marked in a header and counted; what has no business there is refused as ever."""
    async with with_fallback(run_dir) as (running, scripted):
        await parked(running, scripted)
        whole = await running.post({"do": "whole", "bytes": 100})
        stream = await running.post({"do": "stream", "stream": True, "events": 5})
        raw = await running.post({"do": "whole"}, "/generate")
        models = await running.ask("GET", "/v1/models")
        counted = await outcomes(running)
        health = await running.ask("GET", "/health")
    assert (whole.status, whole.headers[MARK], len(whole.json()["text"])) == (200, "127.0.0.1", 100)
    assert (stream.status, stream.headers[MARK], stream.complete, stream.events()[-1]) == (200, "127.0.0.1", True, "[DONE]")
    assert len(stream.events()) == 6
    assert [(answer.status, answer.error()["code"]) for answer in (raw, models, health)] == [(503, "engine_parked")] * 3
    assert counted == {"answered": 2}


async def test_it_sees_the_request_and_nothing_of_its_sender(run_dir: Path) -> None:
    """Its own key, its own model, the path under its base; no cookie, no key of ours, no address."""
    path, secrets = keys_file(run_dir, alice="")
    async with with_fallback(run_dir, f"gateway.api_keys_file={path}", "fallback.model=bigger", engine=False) as (running, scripted):
        await parked(running, scripted)
        headers = {**bearer(secrets["alice"]), "cookie": "session=1", "x_forwarded_for": "10.0.0.7", "accept": "text/plain"}
        seen = await running.ask("POST", f"{CHAT}?x=1", {"do": "whole", "echo": True, "model": "ours", "text": "\u00e4\ud800"}, **headers)
        counted = await outcomes(running, **bearer(secrets["alice"]))
    head = seen.body.decode()
    assert head.startswith("post /api/v1/chat/completions?x=1 http/1.1")
    assert "authorization: bearer sk-for-the-other-one" in head
    assert "accept: text/plain" in head
    for private in ("cookie", "10.0.0.7", secrets["alice"].lower(), "x-forwarded"):
        assert private not in head
    assert counted == {"answered": 1}


async def test_the_model_is_replaced_in_the_body(run_dir: Path) -> None:
    """Everything else stays."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        received.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nset-cookie: a=b\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    named = (f"fallback.base_url=http://127.0.0.1:{port}/v1", "fallback.model=bigger")
    async with appliance(run_dir, *named) as (running, scripted):
        await parked(running, scripted)
        answer = await running.post({"model": "ours", "messages": [{"role": "user", "content": "ä"}], "seed": 7})
    server.close()
    assert json.loads(received[0]) == {"model": "bigger", "messages": [{"role": "user", "content": "ä"}], "seed": 7}
    assert (answer.status, "set-cookie" in answer.headers) == (200, False)


async def test_over_the_queue_s_limit_requests_go_there_too(run_dir: Path) -> None:
    """A full queue, and a wait that would be too long; a key's own limits do not open the door."""
    path, secrets = keys_file(run_dir, alice="", limited="requests_per_minute = 1")
    settings = ("admission.max_concurrent_decodes=1", "admission.queue_size=0", f"gateway.api_keys_file={path}")
    async with with_fallback(run_dir, *settings, engine=False) as (running, scripted):
        await scripted.start_engine()
        await eventually(lambda: b"open:" in running.log.read_bytes(), "open")

        async def ask(name: str, **body: Any) -> Answer:
            return await running.ask("POST", CHAT, {"do": "whole", **body}, **bearer(secrets[name]))

        held = asyncio.ensure_future(ask("alice", delay_s=2))
        due_s = asyncio.get_running_loop().time() + 10
        while (await running.ask("GET", "/status", **bearer(secrets["alice"]))).json()["slots"]["in_use"] != 1:
            assert asyncio.get_running_loop().time() < due_s
        elsewhere, first, second = await ask("alice"), await ask("limited"), await ask("limited")
        assert MARK not in (await held).headers
    assert (elsewhere.status, elsewhere.headers.get(MARK)) == (200, "127.0.0.1")
    assert (first.status, first.headers.get(MARK)) == (200, "127.0.0.1")
    assert (second.status, second.error()["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"do": "whole", "status": 401, "body": "{}"}, 503, "engine_parked"),
        ({"do": "whole", "status": 500, "body": "oops"}, 503, "engine_parked"),
        ({"do": "whole", "status": 400, "body": '{"error": {"message": "no such parameter"}}'}, 400, None),
        ({"do": "raw", "text": "HTTP/1.1 200 X\r\ncontent-length: 50\r\n\r\n{", "close": True}, 503, "engine_parked"),
        ({"do": "raw", "text": "no http at all\r\n\r\n", "close": True}, 503, "engine_parked"),
        ({"do": "never"}, 503, "engine_parked"),
    ],
)
async def test_if_it_does_not_answer_the_refusal_is_ours(run_dir: Path, body: dict[str, Any], status: int, code: str | None) -> None:
    """Its troubles, such as a wrong key of ours, are not the client's; the client's mistakes are."""
    async with with_fallback(run_dir, "fallback.timeout_s=1s") as (running, scripted):
        await parked(running, scripted)
        answer = await running.post(body)
    assert (answer.status, answer.error()["code"]) == (status, code)
    assert (MARK in answer.headers) == (status == 400)


async def test_a_stream_that_breaks_off_there_is_said_in_the_stream(run_dir: Path) -> None:
    """It never ends cleanly without its last event."""
    async with with_fallback(run_dir) as (running, scripted):
        await parked(running, scripted)
        answer = await running.post({"do": "stream", "stream": True, "events": 3, "done": False})
        counted = await outcomes(running)
    assert json.loads(answer.events()[-1])["error"]["code"] == "fallback_lost"
    assert counted == {"lost": 1}


async def test_only_so_many_go_there_at_once(run_dir: Path) -> None:
    """The others are refused as without it."""
    async with with_fallback(run_dir, "fallback.max_concurrent=1") as (running, scripted):
        await parked(running, scripted)
        answers = await asyncio.gather(*(running.post({"do": "whole", "delay_s": 0.5}) for _ in range(3)))
        counted = await outcomes(running)
    assert sorted(answer.status for answer in answers) == [200, 503, 503]
    assert counted == {"answered": 1, "too_many": 2}


async def test_a_client_that_leaves_is_gone_there_too(run_dir: Path) -> None:
    """Nothing is paid for that nobody reads."""
    async with with_fallback(run_dir) as (running, scripted):
        await parked(running, scripted)
        port = int(await fallback_port(running))
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "stream", "stream": True, "events": 1000, "gap_s": 0.01})
            await connection.head()
        due_s = asyncio.get_running_loop().time() + 5
        while not (await GatewayProcess(running.process, port, running.log).ask("GET", "/stats")).json()["aborted_at"]:
            assert asyncio.get_running_loop().time() < due_s


async def fallback_port(running: GatewayProcess) -> str:
    """From its command line."""
    arguments = Path(f"/proc/{running.process.pid}/cmdline").read_text().split("\0")
    return next(argument.split(":")[2].split("/")[0] for argument in arguments if argument.startswith("fallback.base_url="))


@needs_openssl
async def test_its_certificate_is_checked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that the system does not trust gets no prompt."""
    made, key = certificate(run_dir, "other", "-nodes")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    base = f"fallback.base_url=https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    answers = []
    for number, trusted in enumerate((False, True)):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(made))
        (folder := run_dir / str(number)).mkdir()
        async with appliance(folder, base) as (running, scripted):
            await parked(running, scripted)
            answers.append(await running.post({"do": "whole"}))
    server.close()
    assert [answer.status for answer in answers] == [503, 200]
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("fallback.base_url=ftp://x/v1",), "is no http or https URL"),
        (("fallback.base_url=https://user@x/v1",), "is no URL of an API"),
        (("fallback.base_url=https://:99999/v1",), "is no URL of an API"),
        (("fallback.model=bigger",), "fallback.base_url is not"),
        (("fallback.base_url=https://x/v1", "fallback.api_key_file=/nowhere/key"), "fallback.api_key_file"),
    ],
)
async def test_what_cannot_be_a_fallback_stops_the_start(run_dir: Path, settings: tuple[str, ...], words: str) -> None:
    """In one sentence."""
    with pytest.raises(AssertionError, match=words) as refused:
        async with gateway(run_dir, *settings):
            pass
    assert "Traceback" not in str(refused.value)


async def test_without_one_nothing_changes(run_dir: Path) -> None:
    """Off by default."""
    async with appliance(run_dir) as (running, scripted):
        await parked(running, scripted)
        answer = await running.post({"do": "whole"})
        counted = await outcomes(running)
    assert (answer.status, answer.error()["code"], counted) == (503, "engine_parked", {})
