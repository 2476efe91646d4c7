"""Strangers on the port: many, silent, and sending rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_appliance import GatewayProcess, appliance, gateway

CHAT = "/v1/chat/completions"
LEGAL = {200, 400, 404, 405, 408, 413, 429, 431, 503}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


async def test_two_thousand_idle_connections_are_held(run_dir: Path) -> None:
    """Kept alive after one request each; a new client is still served, and all of them again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # our own side of them
    async with appliance(run_dir) as (running, _), contextlib.AsyncExitStack() as stack:
        connections = []
        for _ in range(2000):
            connections.append(await stack.enter_async_context(running.connection()))
            if len(connections) % 100 == 0:
                await asyncio.gather(*(connection.ask("GET", "/") for connection in connections[-100:]))
        assert (await running.post({"do": "whole"})).status == 200
        rollup = Path(f"/proc/{running.process.pid}/smaps_rollup").read_text()
        for connection in random.Random(1).sample(connections, 50):
            assert (await connection.ask("GET", "/health")).status == 200
    pss_kib = int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))
    assert pss_kib < 80 * 1024


async def test_any_body_gets_an_answer(run_dir: Path) -> None:
    """Random JSON and random bytes on every endpoint: a legal status in the envelope, and the gateway lives on."""

    async def ask(running: GatewayProcess, path: str, body: bytes) -> None:
        answer = await running.ask("POST", path, body)
        assert answer.status in LEGAL, (path, body, answer.body)
        if answer.status >= 400:
            answer.error()

    async with gateway(run_dir, "resume.max_wait_s=0") as running:
        loop = asyncio.get_running_loop()

        @FEW
        @given(path=st.sampled_from([CHAT, "/v1/completions", "/generate", "/v1/messages", "/v1/x", "/tokenize"]), body=st.binary() | JSON)
        def fuzz(path: str, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            asyncio.run_coroutine_threadsafe(ask(running, path, data), loop).result(20)

        await asyncio.to_thread(fuzz)
        assert (await running.status())["inflight"] == []
        assert "Traceback" not in running.log.read_text()


async def test_any_bytes_on_the_wire_leave_it_alive(run_dir: Path) -> None:
    """Random bytes, and good requests cut, doubled and mutated; afterwards nothing is in flight and no defect was logged."""
    seeds = [
        b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n{"do":"raw"}',
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\nconnection: keep-alive, upgrade\r\nupgrade: websocket\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\nCONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET http://other/status?x=%ff HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n12",
    ]

    async def throw(running: GatewayProcess, data: bytes) -> None:
        async with running.connection() as connection:
            connection.writer.write(data)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.05):
                    await connection.reader.read()

    async with appliance(run_dir) as (running, _):
        loop = asyncio.get_running_loop()

        @FEW
        @given(
            seed=st.sampled_from(seeds),
            cut=st.integers(0, 120),
            times=st.integers(1, 4),
            at=st.integers(0, 100),
            noise=st.binary(max_size=40),
        )
        def fuzz(seed: bytes, cut: int, times: int, at: int, noise: bytes) -> None:
            data = seed[: len(seed) - cut] * times
            asyncio.run_coroutine_threadsafe(throw(running, data[:at] + noise + data[at:]), loop).result(20)

        await asyncio.to_thread(fuzz)
        await running.until(lambda status: not status["inflight"], "nothing is left in flight")
        assert (await running.post({"do": "whole"})).status == 200
        assert "Traceback" not in running.log.read_text()
