"""What the gateway refuses, and that every refusal is the OpenAI envelope with a sentence that helps."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from pathlib import Path

import pytest

from tests.fakes.scripted_appliance import Answer, Connection, GatewayProcess, appliance, gateway

CHAT = "/v1/chat/completions"


async def test_refusals_that_need_no_engine(run_dir: Path) -> None:
    """Unknown paths, wrong methods and wrong bodies are answered at once, also while there is no engine."""
    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    cases: list[tuple[str, str, bytes | None, int, str, str]] = [
        ("GET", "/nothing", None, 404, "unknown_path", "/nothing"),
        ("GET", "/v1/../flush_cache", None, 404, "unknown_path", "flush_cache"),
        ("GET", "/v1/%2e%2e/flush_cache", None, 404, "unknown_path", "flush_cache"),
        ("GET", CHAT, None, 405, "method_not_allowed", "use POST"),
        ("POST", "/v1/models", b"{}", 405, "method_not_allowed", "use GET"),
        ("POST", "/health", b"{}", 405, "method_not_allowed", "use GET"),
        ("TRACE", "/v1/whatever", None, 405, "method_not_allowed", "TRACE"),
        ("POST", CHAT, b"", 400, "invalid_json", "Expecting value"),
        ("POST", CHAT, b'{"model": ', 400, "invalid_json", "line 1"),
        ("POST", CHAT, b"[1, 2]", 400, "invalid_json", "list, expected an object"),
        ("POST", CHAT, b"3", 400, "invalid_json", "number, expected an object"),
        ("POST", "/generate", b"null", 400, "invalid_json", "null, expected an object"),
        ("POST", CHAT, b'{"a": "\xff\xfe"}', 400, "invalid_utf8", "byte 7 is 0xff"),
        ("POST", CHAT, b'{"a": ' + b"9" * 6000 + b"}", 400, "invalid_json", "more than 4300 digits; send a shorter"),
        ("POST", CHAT, deep, 400, "invalid_json", "too deeply"),
        ("POST", CHAT, b'{"a": [' + b"1," * 600_000 + b"1]}", 413, "body_too_complex", "500000"),
    ]
    async with gateway(run_dir) as running:
        for method, path, body, status, code, words in cases:
            answer = await running.ask(method, path, body)
            assert (answer.status, answer.error()["code"]) == (status, code), (path, body and body[:40], answer.body)
            assert words in answer.error()["message"]
            assert answer.headers["x-request-id"].startswith("req-")
        assert (await running.ask("GET", CHAT)).headers["allow"] == "POST"


async def test_what_headers_ask_for_wrongly_is_refused(run_dir: Path) -> None:
    """A compressed body, times that are none, unknown classes: the value and what it may be."""
    packed = gzip.compress(json.dumps({"model": "m"}).encode())
    cases: list[tuple[dict[str, str], bytes, int, str, str]] = [
        ({"content_encoding": "gzip"}, packed, 415, "unsupported_encoding", "Content-Encoding: gzip"),
        ({"content_encoding": "br, zstd"}, b"{}", 415, "unsupported_encoding", "br, zstd"),
        (
            {"x_request_timeout": "soon"},
            b"{}",
            400,
            "invalid_timeout",
            "'soon'; it must be a number of seconds, more than 0 and at most 86400",
        ),
        ({"x_request_timeout": "0"}, b"{}", 400, "invalid_timeout", "'0'"),
        ({"x_request_timeout": "nan"}, b"{}", 400, "invalid_timeout", "'nan'"),
        ({"x_request_timeout": "1e9"}, b"{}", 400, "invalid_timeout", "'1e9'"),
        ({"x_priority": "urgent"}, b"{}", 400, "invalid_priority", "'urgent'"),
    ]
    async with gateway(run_dir) as running:
        for headers, body, status, code, words in cases:
            answer = await running.ask("POST", CHAT, body, **headers)
            assert (answer.status, answer.error()["code"]) == (status, code), (headers, answer.body)
            assert words in answer.error()["message"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read(run_dir: Path) -> None:
    """413 with both numbers, whether the length was announced, sent in chunks, or asked about first."""
    async with gateway(run_dir, "gateway.max_body_bytes=10KiB") as running:
        announced = await running.ask("POST", CHAT, b"x" * 20_000)
        chunked = await running.ask(
            "POST", CHAT, b"2000\r\n" + b"x" * 8192 + b"\r\n" + b"2000\r\n" + b"x" * 8192 + b"\r\n0\r\n\r\n", transfer_encoding="chunked"
        )
        async with running.connection() as connection:
            began = time.monotonic()
            connection.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999\r\n\r\n")
            expecting = await connection.answer()
            took_s = time.monotonic() - began
    for answer in (announced, chunked, expecting):
        assert (answer.status, answer.error()["code"]) == (413, "body_too_large")
        assert "limit is 10240" in answer.error()["message"]
    assert expecting.headers["connection"] == "close"
    assert took_s < 1


async def test_a_refusal_never_mixes_with_a_body_that_is_still_coming(run_dir: Path) -> None:
    """404 and 405 for uploads of a megabyte: each is read by its client, and the connection answers the next request rightly."""
    async with gateway(run_dir) as running, running.connection() as connection:
        for path, status in (("/nothing", 404), ("/v1/models", 405), ("/health", 405)):
            answer = await connection.ask("POST", path, b"x" * 1_000_000)
            assert (answer.status, "connection" in answer.headers) == (status, False)
        answer = await connection.ask("GET", "/", b"y" * 300_000)
        assert answer.status == 200


async def test_a_refused_body_that_never_ends_is_not_read_for_ever(run_dir: Path) -> None:
    """Chunks without end to a path that does not exist: the 404 comes, and then the end."""
    async with gateway(run_dir, "gateway.header_timeout_s=1") as running, running.connection() as connection:
        connection.writer.write(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        answering = asyncio.ensure_future(connection.answer())
        while not answering.done():
            connection.writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            await asyncio.sleep(0.01)
        answer = await answering
        assert (answer.status, answer.headers["connection"]) == (404, "close")


async def test_a_body_that_waits_for_leave_to_be_sent_gets_it(run_dir: Path) -> None:
    """Expect: 100-continue within the limit."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        body = json.dumps({"do": "whole"}).encode()
        connection.writer.write(
            b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
        )
        assert (await connection.head())[0] == 100
        connection.writer.write(body)
        assert (await connection.answer()).status == 200


async def test_a_client_that_sends_its_head_slowly_is_cut_off(run_dir: Path) -> None:
    """408 after header_timeout_s; a connection that says nothing at all is closed without words."""
    async with gateway(run_dir, "gateway.header_timeout_s=0.5") as running:
        async with running.connection() as connection:
            began = time.monotonic()
            for letter in b"GET /health HTTP/1.1\r\nx-long: ":
                connection.writer.write(bytes([letter]))
                await asyncio.sleep(0.02)
            answer = await connection.answer()
            assert (answer.status, answer.error()["code"]) == (408, "request_timeout")
            assert time.monotonic() - began < 5
        async with running.connection() as connection:
            assert await asyncio.wait_for(connection.reader.read(), 5) == b""
        assert (await running.status())["totals"]["connections_cut"] == {"slow_head": 2}


async def test_a_client_that_sends_its_body_slowly_is_cut_off(run_dir: Path) -> None:
    """408, and the connection with it."""
    async with gateway(run_dir, "gateway.header_timeout_s=0.5") as running, running.connection() as connection:
        connection.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        answer = await connection.answer()
        assert (answer.status, answer.error()["code"]) == (408, "request_timeout")
        assert "body" in answer.error()["message"]
        assert await asyncio.wait_for(connection.reader.read(), 5) == b""


async def test_an_endless_head_is_cut_off(run_dir: Path) -> None:
    """431 past 64 KiB."""
    async with gateway(run_dir) as running, running.connection() as connection:
        connection.writer.write(b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(400)))
        answer = await connection.answer()
        assert (answer.status, answer.error()["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "said",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"HELO there\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"],
)
async def test_what_is_no_http_is_told_so(run_dir: Path, said: bytes) -> None:
    """TLS on the plain port, other protocols, broken heads: 400 in the envelope, and the connection is closed."""
    async with gateway(run_dir) as running, running.connection() as connection:
        connection.writer.write(said)
        answer = await connection.answer()
        assert (answer.status, answer.error()["code"]) == (400, "invalid_http")
        assert await asyncio.wait_for(connection.reader.read(), 5) == b""


async def test_rubbish_behind_a_request_never_lands_in_its_answer(run_dir: Path) -> None:
    """A stream whose client sends garbage is finished, not written into, and nothing follows it."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        connection.send("POST", CHAT, {"do": "stream", "stream": True, "events": 20, "gap_s": 0.02})
        await connection.head()
        await connection.chunk()
        connection.writer.write(b"\x00\x01garbage\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        rest = await asyncio.wait_for(connection.reader.read(), 5)
        assert b"HTTP/1.1" not in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_body_that_breaks_off_into_rubbish_is_told_so(run_dir: Path) -> None:
    """A broken chunk in the middle of a body: 400, and the connection is closed."""
    async with gateway(run_dir) as running, running.connection() as connection:
        connection.writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n')
        await asyncio.sleep(0.1)
        connection.writer.write(b"not a length\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.error()["code"]) == (400, "invalid_http")
        assert await asyncio.wait_for(connection.reader.read(), 5) == b""


async def test_a_client_that_never_reads_is_cut_off_and_its_slot_freed(run_dir: Path) -> None:
    """After write_timeout_s without a byte taken; the engine's connection goes with it."""
    async with appliance(run_dir, "gateway.write_timeout_s=1s") as (running, _):
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", running.port))
            body = json.dumps({"do": "stream", "stream": True, "events": 100_000, "bytes": 2000}).encode()
            deaf.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
            await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
            status = await running.until(lambda status: status["slots"]["in_use"] == 0, "it was cut off")
        assert status["totals"]["connections_cut"] == {"never_reads": 1}
        assert (await _upstream(running)).json()["aborted_at"]


async def test_a_client_that_reads_slowly_is_not_cut_off(run_dir: Path) -> None:
    """A little now and then is enough, and what it reads is whole."""
    async with appliance(run_dir, "gateway.write_timeout_s=1s") as (running, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=4096)
        body = json.dumps({"do": "stream", "stream": True, "events": 2000, "bytes": 1000}).encode()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        received = bytearray()
        while piece := await reader.read(65536):
            received += piece
            if len(received) < 1_200_000:
                await asyncio.sleep(0.12)
        writer.close()
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_bodies_together_may_hold_only_so_much(run_dir: Path) -> None:
    """Eight of the largest size; the ninth is told to come back."""
    async with gateway(run_dir, "gateway.max_body_bytes=64KiB") as running:
        body = json.dumps({"messages": "x" * 65_000}).encode()
        waiting = [asyncio.ensure_future(running.ask("POST", CHAT, body)) for _ in range(8)]
        await running.until(lambda status: status["queue"]["length"] == 8, "eight wait for the engine")
        refused: Answer = await running.ask("POST", CHAT, body)
        assert (refused.status, refused.error()["code"]) == (503, "gateway_overloaded")
        assert refused.headers["retry-after"] == "5"
        for task in waiting:
            task.cancel()
        await running.until(lambda status: status["queue"]["length"] == 0, "they left")
        retried = asyncio.ensure_future(running.ask("POST", CHAT, body))
        await running.until(lambda status: status["queue"]["length"] == 1, "there is room again")
        retried.cancel()


async def _upstream(running: GatewayProcess) -> Answer:
    """The fake engine's own numbers, asked directly."""
    reader, writer = await asyncio.open_unix_connection(str(running.log.parent / "engine-1.sock"))
    answer = await Connection(reader, writer).ask("GET", "/stats")
    writer.close()
    return answer
