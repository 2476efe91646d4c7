"""HTTP as clients of all ages speak it, looked at byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_appliance import GatewayProcess, appliance, gateway

CHAT = "/v1/chat/completions"


def request(body: dict[str, Any] | None, path: str = CHAT, version: str = "1.1", *headers: str) -> bytes:
    """As bytes; GET without a body."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "host: x", *headers]
    lines += [] if body is None else [f"content-length: {len(data)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def said(running: GatewayProcess, sent: bytes, *, half_close: bool = False) -> bytes:
    """All that comes back until the connection ends."""
    async with running.connection() as connection:
        connection.writer.write(sent)
        if half_close:
            connection.writer.write_eof()
        return await asyncio.wait_for(connection.reader.read(), 10)


async def test_http_1_0_gets_no_chunks(run_dir: Path) -> None:
    """Its streams end with their connection, its whole answers have a length, and the connection ends after either."""
    async with appliance(run_dir) as (running, _):
        head, _, body = (await said(running, request({"do": "stream", "stream": True, "events": 3}, CHAT, "1.0"))).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b"data: ") == 4
        head, _, body = (await said(running, request({"do": "whole", "bytes": 99}, CHAT, "1.0"))).partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
        assert json.loads(body) == {"text": "x" * 99}
        head, _, body = (await said(running, request(None, "/status", "1.0", "connection: keep-alive"))).partition(b"\r\n\r\n")
        assert json.loads(body)["standing"] == "open"


async def test_no_header_is_said_twice(run_dir: Path) -> None:
    """Also where the engine says it too."""
    head = b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\ndate: x\r\nserver: y\r\n"
    text = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
    raw = b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (head, len(text), text)
    async with appliance(run_dir) as (running, _):
        answers = [
            await said(running, request({"do": "raw", "text": raw.decode(), "stream": True}, CHAT, "1.1", "connection: close")),
            await said(running, request({"do": "whole"}, CHAT, "1.1", "connection: close")),
            await said(running, request(None, "/nothing", "1.1", "connection: close")),
        ]
    for answer in answers:
        names = [line.partition(b":")[0] for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
        assert len(names) == len(set(names)), names
    assert b"x-accel-buffering: no\r\n" in answers[0]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_closes_its_side_gets_its_answer(run_dir: Path, version: str) -> None:
    """`nc -N` and its like: a stream is whole, before its first byte and in the middle."""
    async with appliance(run_dir) as (running, _):
        sent = request({"do": "stream", "stream": True, "events": 5, "delay_s": 0.2, "gap_s": 0.05}, CHAT, version)
        answer = await said(running, sent, half_close=True)
        assert answer.count(b"data: {") == 5
        assert b"data: [DONE]" in answer
        async with running.connection() as connection:
            connection.writer.write(sent)
            await connection.reader.readuntil(b"t0")
            connection.writer.write_eof()
            rest = await asyncio.wait_for(connection.reader.read(), 10)
        assert b"data: [DONE]" in rest
        page = await said(running, request(None, "/health", version), half_close=True)
        assert b'"status": "ok"' in page


async def test_a_client_that_closes_its_side_gets_a_whole_answer(run_dir: Path) -> None:
    """It first hears `100 Continue`, which tells us whether it is there."""
    async with appliance(run_dir) as (running, _):
        answer = await said(running, request({"do": "whole", "bytes": 9, "delay_s": 0.3}), half_close=True)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert answer.endswith(b'{"text": "xxxxxxxxx"}')
        assert (await running.status())["totals"]["requests"].get("499") is None


async def test_one_that_closed_its_side_and_then_left_is_noticed(run_dir: Path) -> None:
    """Its kernel resets what we write."""
    async with appliance(run_dir) as (running, _):
        async with running.connection() as connection:
            connection.writer.write(request({"do": "stream", "stream": True, "events": 1000, "gap_s": 0.02}))
            await connection.reader.readuntil(b"t0")
            connection.writer.write_eof()
            await connection.reader.readuntil(b"t9")
        await running.until(lambda status: status["slots"]["in_use"] == 0, "it was noticed")
        assert (await running.status())["totals"]["requests"]["499"] == 1


async def test_one_that_waited_and_then_left_is_noticed(run_dir: Path) -> None:
    """It closed its side, heard that it may wait, and left: nobody tells us, so it is asked again and again."""
    async with appliance(run_dir) as (running, _):
        async with running.connection() as connection:
            connection.writer.write(request({"do": "never"}))
            connection.writer.write_eof()
            await connection.reader.readuntil(b"100 Continue\r\n\r\n")
            await running.until(lambda status: status["slots"]["in_use"] == 1, "it waits")
        await running.until(lambda status: status["slots"]["in_use"] == 0, "it was noticed")
        assert (await running.status())["totals"]["requests"]["499"] == 1


async def test_what_will_never_come_is_refused_at_once(run_dir: Path) -> None:
    """A body of a terabyte gets its 413 without waiting for the body; and the connection ends."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n" % CHAT.encode()
    async with gateway(run_dir) as running, running.connection() as connection:
        began = time.monotonic()
        connection.writer.write(head + b"x" * 100)
        answer = await connection.answer()
        took_s = time.monotonic() - began
        assert (answer.status, answer.error()["code"], answer.headers["connection"]) == (413, "body_too_large", "close")
        assert await asyncio.wait_for(connection.reader.read(), 5) == b""
    assert took_s < 0.5


async def test_the_refusal_of_a_body_that_goes_on_coming_can_be_read(run_dir: Path) -> None:
    """A client that only reads when it has written 40 MB finds the 413, and no reset."""

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 40000000\r\n\r\n" % CHAT.encode())
            for _ in range(40):
                client.sendall(b"x" * 1_000_000)
            return b"".join(iter(lambda: client.recv(65536), b""))

    async with gateway(run_dir) as running:
        answer = await asyncio.to_thread(ask, running.port)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in answer


async def test_a_path_that_no_engine_has_is_refused_while_there_is_none(run_dir: Path) -> None:
    """Once an engine has said what it has; the refusal names the path and what there is."""
    async with appliance(run_dir) as (running, scripted):
        limits = scripted.limits
        scripted.serve(type(limits)("fake", 4096, 8, 32768, paths=("/v1/chat/completions", "/v1/models", "/v1/models/")))
        await running.until(lambda status: status["publication"]["limits"]["paths"], "the paths are known")
        await scripted.crash()
        await running.until(lambda status: status["standing"] == "hold", "it is away")
        answer = await asyncio.wait_for(running.ask("POST", "/v1/embeddings", {"input": "x"}), 5)
        assert (answer.status, answer.error()["code"]) == (404, "unknown_path")
        assert "/v1/embeddings" in answer.error()["message"]
        assert "/v1/chat/completions" in answer.error()["message"]
        waiting = asyncio.ensure_future(running.post({"do": "whole"}))
        model = asyncio.ensure_future(running.ask("GET", "/v1/models/fake"))
        await running.until(lambda status: status["queue"]["length"] == 1, "what it has is waited for")
        await scripted.start_engine()
        assert (await waiting).status == (await model).status == 200


async def test_a_404_of_the_engine_names_the_path(run_dir: Path) -> None:
    """FastAPI's says `Not Found` and no more."""
    async with appliance(run_dir) as (running, _):
        answer = await running.ask("POST", "/v1/rerank", {"do": "whole", "status": 404, "body": '{"detail":"Not Found"}'})
    assert answer.status == 404
    assert "/v1/rerank" in answer.error()["message"]


async def test_one_that_resets_while_it_is_refused_is_no_defect(run_dir: Path) -> None:
    """The refusal of a body to come, and the client is gone in the same moment: nothing in the journal."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" % CHAT.encode()
    async with gateway(run_dir) as running:
        for _ in range(50):
            async with running.connection() as connection:
                connection.writer.write(head + b"x" * 20_000)
                accepted: socket.socket = connection.writer.get_extra_info("socket")
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.writer.transport.abort()
        assert (await running.ask("GET", "/")).status == 200
        assert "Traceback" not in running.log.read_text()


OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")


@pytest.mark.parametrize("cut", [0, 30, -60, -5])
async def test_an_offer_of_another_protocol_costs_nothing(run_dir: Path, cut: int) -> None:
    """Java's own client and `curl --http2` offer h2c with their first request: it is answered as HTTP/1.1 with the body it has, in whatever
    packets that comes, and so is the next one on the connection. The engine hears nothing of the offer."""
    whole = request({"do": "whole", "echo": True}, CHAT, "1.1", *OFFER)
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        for sent in (whole, _in_chunks(whole), request(None, "/health", "1.1", *OFFER), request({"do": "whole", "bytes": 9}, CHAT, "1.1")):
            connection.writer.write(sent[:cut] if cut else sent)
            if cut:
                await connection.writer.drain()
                await asyncio.sleep(0.05)
                connection.writer.write(sent[cut:])
            answer = await asyncio.wait_for(connection.answer(), 5)
            assert answer.status == 200, answer.body
            if b"echo" in sent:
                assert answer.body.startswith(b"post /v1/chat/completions")
                assert b"upgrade" not in answer.body
                assert b"http2-settings" not in answer.body
        assert (await running.status())["totals"]["connections_cut"] == {}


def _in_chunks(sent: bytes) -> bytes:
    """The same request with a chunked body."""
    head, _, body = sent.partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    return b"\r\n".join([*kept, b"transfer-encoding: chunked", b"", b"%x" % len(body), body, b"0", b"", b""])
