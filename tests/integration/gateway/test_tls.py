"""TLS by certificate files, and what web pages may do."""

from __future__ import annotations

import asyncio
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_appliance import Connection, GatewayProcess, ScriptedAppliance, appliance, eventually, gateway

CHAT = "/v1/chat/completions"
OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="NOT CHECKED: openssl is missing; apt-get install openssl")


def certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A self-signed pair for 127.0.0.1."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", *more]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made, key


@asynccontextmanager
async def secured(run_dir: Path, *settings: str) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance, Path]]:
    """A gateway that speaks TLS, an engine behind it, and the certificate to trust."""
    made, key = certificate(run_dir, "first", "-nodes")
    tls = (f"gateway.tls_certificate={made}", f"gateway.tls_key={key}")
    async with appliance(run_dir, *tls, *settings, engine=False) as (running, scripted):
        await scripted.start_engine()
        await eventually(lambda: b"open:" in running.log.read_bytes(), "the gateway is open")
        yield running, scripted, made


@asynccontextmanager
async def client(running: GatewayProcess, trusted: Path, **options: Any) -> AsyncIterator[Connection]:
    """A connection that checks the certificate."""
    context = ssl.create_default_context(cafile=str(trusted))
    for name, value in options.items():
        setattr(context, name, value)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=context)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@needs_openssl
async def test_answers_and_streams_over_tls(run_dir: Path) -> None:
    """Whole, streamed, kept alive, large; the log names the address with https."""
    async with secured(run_dir) as (running, _, trusted), client(running, trusted) as connection:
        whole = await connection.ask("POST", CHAT, {"do": "whole", "bytes": 3_000_000})
        stream = await connection.ask("POST", CHAT, {"do": "stream", "stream": True, "events": 50, "role": True})
        large = await connection.ask("POST", CHAT, {"do": "whole", "filler": "x" * 2_000_000})
        assert f"listening on https://127.0.0.1:{running.port}" in running.log.read_text()
    assert (whole.status, len(whole.body) > 3_000_000) == (200, True)
    assert (stream.complete, len(stream.events())) == (True, 52)
    assert large.status == 200


@needs_openssl
async def test_a_client_that_leaves_is_noticed_over_tls(run_dir: Path) -> None:
    """Mid-stream, and before the first byte; whether it says goodbye or not."""
    async with secured(run_dir) as (running, scripted, trusted):
        for number, (body, polite) in enumerate(
            (
                ({"do": "stream", "stream": True, "events": 1000, "gap_s": 0.01}, True),
                ({"do": "stream", "stream": True, "events": 1000, "gap_s": 0.01}, False),
                ({"do": "never"}, True),
                ({"do": "never"}, False),
            )
        ):
            async with client(running, trusted) as connection:
                connection.send("POST", CHAT, body)
                if body["do"] == "stream":
                    await connection.head()
                    await connection.chunk()
                else:
                    await in_use(running, trusted, 1)
                left_s = time.monotonic()
                if polite:
                    connection.writer.close()
                else:
                    connection.writer.transport.abort()
                aborted = await aborts(scripted, number + 1)
            assert aborted[-1] - left_s < 1.0


async def in_use(running: GatewayProcess, trusted: Path, count: int) -> None:
    """So many slots are taken."""
    async with client(running, trusted) as connection:
        due_s = time.monotonic() + 10
        while (await connection.ask("GET", "/status")).json()["slots"]["in_use"] != count:
            assert time.monotonic() < due_s


async def aborts(scripted: ScriptedAppliance, count: int) -> list[float]:
    """When the engine's clients left, once it has seen so many."""
    due_s = time.monotonic() + 10
    while True:
        reader, writer = await asyncio.open_unix_connection(str(scripted.run_dir / f"engine-{scripted.generation}.sock"))
        found = list((await Connection(reader, writer).ask("GET", "/stats")).json()["aborted_at"])
        writer.close()
        if len(found) >= count:
            return found
        assert time.monotonic() < due_s, found


@needs_openssl
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_what_is_no_tls_or_old_tls_is_turned_away(run_dir: Path) -> None:
    """Plain HTTP, garbage, TLS 1.1, a handshake that never ends: nothing is answered, nobody else is disturbed."""
    async with secured(run_dir, "gateway.header_timeout_s=0.5s") as (running, _, trusted):
        for said in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"\xff" * 600, b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(said)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b"HTTP/" not in answer
            writer.close()
        with pytest.raises((ssl.SSLError, ConnectionResetError)):  # the alert, or the end of the connection right behind it
            async with client(running, trusted, minimum_version=ssl.TLSVersion.TLSv1_1, maximum_version=ssl.TLSVersion.TLSv1_1):
                pass
        async with client(running, trusted) as connection:
            assert (await connection.ask("GET", "/health")).status == 200
            connection.writer.write(b"no HTTP\r\n\r\n")
            assert (await connection.answer()).error()["code"] == "invalid_http"
        assert "Traceback" not in running.log.read_text()


@needs_openssl
async def test_a_renewed_certificate_is_read_on_sighup(run_dir: Path) -> None:
    """Running connections go on, new ones get the new one; a broken file changes nothing and is said."""
    async with secured(run_dir) as (running, _, trusted), client(running, trusted) as old:
        assert (await old.ask("GET", "/health")).status == 200
        renewed, key = certificate(run_dir, "second", "-nodes")
        shutil.copy(run_dir / "first.pem", run_dir / "kept.pem")
        shutil.move(renewed, run_dir / "first.pem")
        shutil.move(key, run_dir / "first.key")
        running.process.send_signal(signal.SIGHUP)
        await eventually(lambda: b"certificate read from" in running.log.read_bytes(), "the renewed one was read")
        with pytest.raises(ssl.SSLCertVerificationError):
            async with client(running, run_dir / "kept.pem"):
                pass
        async with client(running, run_dir / "first.pem") as new:
            assert (await new.ask("GET", "/health")).status == 200
        shutil.copy(run_dir / "first.pem", run_dir / "kept.pem")
        (run_dir / "first.pem").write_text("no certificate")
        running.process.send_signal(signal.SIGHUP)
        await eventually(lambda: b"the certificate stays as it was" in running.log.read_bytes(), "the error was said")
        async with client(running, run_dir / "kept.pem") as new:
            assert (await new.ask("GET", "/health")).status == 200
        assert (await old.ask("GET", "/health")).status == 200


@needs_openssl
@pytest.mark.parametrize("fault", ["missing", "garbage", "another's key", "passphrase", "alone"])
async def test_a_pair_that_cannot_be_used_stops_the_start(run_dir: Path, fault: str) -> None:
    """In one sentence with the two keys of the configuration, and without asking for a passphrase."""
    made, key = certificate(run_dir, "first", *(("-passout", "pass:secret") if fault == "passphrase" else ("-nodes",)))
    settings = [f"gateway.tls_certificate={made}", f"gateway.tls_key={key}"]
    if fault == "missing":
        key.unlink()
    elif fault == "garbage":
        made.write_text("no certificate")
    elif fault == "another's key":
        settings[1] = f"gateway.tls_key={certificate(run_dir, 'second', '-nodes')[1]}"
    elif fault == "alone":
        del settings[1]
    with pytest.raises(AssertionError, match="tls_key") as refused:
        async with gateway(run_dir, *settings):
            pass
    assert "Traceback" not in str(refused.value)


async def test_cross_origin_access_is_off(run_dir: Path) -> None:
    """No page in a browser reads an answer, and an engine's own leave is not passed on."""
    async with appliance(run_dir) as (running, _):
        raw = "HTTP/1.1 200 X\r\naccess-control-allow-origin: *\r\ncontent-length: 2\r\n\r\n{}"
        answer = await running.ask("POST", CHAT, {"do": "raw", "text": raw}, origin="https://evil.example")
        asked = await running.ask("OPTIONS", CHAT, origin="https://evil.example", access_control_request_method="POST")
    assert answer.status == 200
    assert not any(name.startswith("access-control") for name in {**answer.headers, **asked.headers})
    assert asked.status == 405


async def test_named_origins_may_ask(run_dir: Path) -> None:
    """Preflight without a key, answers, errors and streams that the page may read; others get nothing."""
    mine = "https://chat.example.org"
    async with appliance(run_dir, f'gateway.cors_origins=["{mine}"]') as (running, _):
        asks = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
        preflight = await running.ask("OPTIONS", CHAT, origin=mine, **asks)
        stranger = await running.ask("OPTIONS", CHAT, origin="https://evil.example", **asks)
        answers = [
            await running.ask("POST", CHAT, {"do": "whole"}, origin=mine),
            await running.ask("POST", CHAT, {"do": "stream", "stream": True}, origin=mine),
            await running.ask("POST", CHAT, b"no json", origin=mine),
            await running.ask("GET", "/nothing", origin=mine),
        ]
        other = await running.ask("POST", CHAT, {"do": "whole"}, origin="https://evil.example")
        none = await running.ask("POST", CHAT, {"do": "whole"})
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, mine)
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert stranger.status == 405
    assert [answer.status for answer in answers] == [200, 200, 400, 404]
    assert {answer.headers.get("access-control-allow-origin") for answer in answers} == {mine}
    assert "x-request-id" in answers[0].headers["access-control-expose-headers"]
    for answer in (other, none, stranger):
        assert "access-control-allow-origin" not in answer.headers
