"""Clients that leave, that never read, and that come while the engine cannot take them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, read_answer, request_bytes, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"prompt": "x", "ignore_eos": True}


async def until(condition: Callable[[], bool], within_s: float = 5) -> None:
    """Wait for a condition, at most so long."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still not so after {within_s} s"
        await asyncio.sleep(0.005)


async def begin(one: Served, body: object, path: str = TEXT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await one.connect()
    writer.write(request_bytes("POST", path, json.dumps(body).encode()))
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_byte_aborts(folder: Path, stream: bool) -> None:
    """The connection closes while the prompt is still being prefilled: aborted at once, with or without a stream."""
    async with served(ScriptedEngine(), folder) as one:
        one.engine.gate.clear()
        _, writer = await begin(one, {**ENDLESS, "stream": stream})
        await until(lambda: one.engine.running == 1)
        writer.close()
        await until(lambda: one.engine.running == 0, within_s=1)
        assert one.engine.aborted == [one.engine.submitted[0].request_id]
        assert 'outcome="disconnected"} 1' in (await one.get("/metrics")).body.decode()


async def test_leaving_in_the_middle_aborts(folder: Path) -> None:
    """A client that read some of the stream and closes: no further token is computed for it."""
    async with served(ScriptedEngine(step_s=0.01), folder) as one:
        reader, writer = await begin(one, {**ENDLESS, "stream": True})
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await until(lambda: one.engine.running == 0, within_s=1)
        assert len(one.engine.aborted) == 1
        assert one.engine.produced < 100


async def test_leaving_without_stream_in_the_middle_aborts(folder: Path) -> None:
    """The same for an answer that would have come in one piece."""
    async with served(ScriptedEngine(step_s=0.01), folder) as one:
        _, writer = await begin(one, ENDLESS)
        await until(lambda: one.engine.produced > 3)
        writer.close()
        await until(lambda: one.engine.running == 0, within_s=1)
        assert one.engine.produced < 100


async def test_leaving_inside_the_body_reaches_nobody(folder: Path) -> None:
    """Half a body and a closed connection: nothing is submitted, the server goes on."""
    async with served(ScriptedEngine(), folder) as one:
        _, writer = await one.connect()
        writer.write(request_bytes("POST", TEXT, json.dumps(ENDLESS).encode())[:-5])
        await until(lambda: one.server.service.active == 1)
        writer.close()
        await until(lambda: one.server.service.active == 0)
        assert one.engine.submitted == []
        assert (await one.get("/health")).status == 200


async def test_finished_answers_are_not_aborted(folder: Path) -> None:
    """A client that hangs up after the last byte is no disconnect; nor does keep-alive confuse the next request."""
    async with served(ScriptedEngine(), folder) as one:
        reader, writer = await one.connect()
        raw = request_bytes("POST", TEXT, json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode())
        for _ in range(3):
            writer.write(raw.replace(b"connection: close", b"connection: keep-alive"))
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        await until(lambda: one.server.service.active == 0)
        assert one.engine.aborted == []
        assert 'outcome="finished"} 3' in (await one.get("/metrics")).body.decode()


async def test_pipelined_requests_wait_their_turn(folder: Path) -> None:
    """Two requests sent at once on one connection are both answered, in order: the second's bytes are no disconnect."""
    async with served(ScriptedEngine(step_s=0.005), folder) as one:
        reader, writer = await one.connect()
        for index, connection in enumerate((b"keep-alive", b"close")):
            raw = request_bytes(
                "POST", "/generate", json.dumps({"input_ids": [50 + index], "sampling_params": {"max_new_tokens": 5}}).encode()
            )
            writer.write(raw.replace(b"connection: close", b"connection: " + connection))
        async with asyncio.timeout(10):
            everything = await reader.read()
        assert everything.index(b"[50,50,50,50,50]") < everything.index(b"[51,51,51,51,51]")
        assert one.engine.aborted == []


async def test_client_that_never_reads_is_cut_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may hold 64 KiB of the transport and its kernel buffers for the write timeout, then its sequence is aborted."""
    caplog.set_level(logging.WARNING)
    async with served(ScriptedEngine(context=200_000), folder, write_timeout_s=0.3) as one:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", one.port))
        sock.sendall(request_bytes("POST", TEXT, json.dumps({**ENDLESS, "prompt": "dog", "stream": True}).encode()))
        await until(lambda: one.engine.running == 1)
        await until(lambda: one.server.service.active == 0, within_s=20)
        await until(lambda: one.engine.running == 0)
        assert "A client read nothing" in caplog.text
        assert one.engine.produced < 199_000
        sock.close()


async def test_slow_reader_is_not_cut_off(folder: Path) -> None:
    """Somebody who needs several write timeouts for what the transport holds, but does read, gets every byte."""
    async with served(ScriptedEngine(context=1_000), folder, write_timeout_s=0.6) as one:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", one.port))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, request_bytes("POST", TEXT, json.dumps({**ENDLESS, "stream": True}).encode()))
        received = bytearray()
        async with asyncio.timeout(30):
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = await loop.sock_recv(sock, 4 * 1024)
                assert part, "the connection was cut"
                received += part
                await asyncio.sleep(0.1)
        assert received.count(b'"finish_reason":"length"') == 1
        assert len(received) > 64 * 1024
        sock.close()


async def test_draining_refuses_new_requests_and_finishes_running_ones(folder: Path) -> None:
    """After stop(): /health and new requests get 503 with Retry-After, the running stream goes on to its end."""
    engine = ScriptedEngine()
    async with served(engine, folder) as one:
        engine.gate.clear()
        reader, _ = await begin(one, {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True})
        await until(lambda: engine.running == 1)
        one.server.stop()
        refused = await one.post(TEXT, {"prompt": "x"})
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "engine_draining", "1")
        health = await one.get("/health")
        assert (health.status, health.json["status"], health.json["running"]) == (503, "draining", 1)
        engine.gate.set()
        assert (await read_answer(reader)).events[-1] == "[DONE]"


async def test_log_has_lengths_and_never_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line a request: ids, counts, the reason, the times. Not a word of the prompt or the answer."""
    caplog.set_level(logging.INFO)
    async with served(ScriptedEngine(), folder) as one:
        body = {"messages": [{"role": "user", "content": "Viktor jagt"}], "max_tokens": 3, "ignore_eos": True}
        await one.post(CHAT, body, x_request_id="req-7")
        await one.post(CHAT, body, x_request_id="bad id")
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Request ")]
        assert (
            f"{one.engine.submitted[0].request_id} ended. path=/v1/chat/completions gateway_id=req-7 finish=length prompt_tokens="
            in lines[0]
        )
        assert "completion_tokens=3" in lines[0]
        assert "gateway_id=- " in lines[1]
    assert "Viktor" not in caplog.text
