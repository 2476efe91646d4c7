"""A client that leaves frees its slot, and the engine hears of it at once."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_appliance import Connection, GatewayProcess, appliance

CHAT = "/v1/chat/completions"
LIMIT_S = 0.020


async def _stats(run_dir: Path) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(run_dir / "engine-1.sock"))
    answer = await Connection(reader, writer).ask("GET", "/stats")
    writer.close()
    return dict(answer.json())


def _reset(connection: Connection) -> None:
    """Close with a RST, as a killed client's kernel may."""
    accepted: socket.socket = connection.writer.get_extra_info("socket")
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.writer.transport.abort()


@pytest.mark.parametrize("rude", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(
    ("asked", "chunks"),
    [
        ({"do": "never"}, 0),
        ({"do": "never", "stream": True}, 0),
        ({"do": "stream", "stream": True, "events": 1000, "gap_s": 0.02}, 1),
    ],
    ids=["whole", "before-the-first-byte", "mid-stream"],
)
async def test_the_engine_hears_of_it_within_twenty_milliseconds(run_dir: Path, asked: dict[str, Any], chunks: int, rude: bool) -> None:
    """Whole or streamed, before the first byte or in the middle, politely or not (the best of eleven)."""
    async with appliance(run_dir) as (running, _):
        left_at = []
        for _ in range(11):
            async with running.connection() as connection:
                connection.send("POST", CHAT, asked)
                await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
                if chunks:
                    await connection.head()
                    await connection.chunk()
                left_at.append(time.monotonic())
                if rude:
                    _reset(connection)
            await running.until(lambda status: status["slots"]["in_use"] == 0, "the slot is free")
        due_s = time.monotonic() + 10
        while len((stats := await _stats(run_dir))["aborted_at"]) < 11:
            assert time.monotonic() < due_s, stats
        status = await running.status()
    delays_s = [seen - left for left, seen in zip(left_at, stats["aborted_at"], strict=True)]
    assert min(delays_s) < LIMIT_S  # what the code needs; the median of a busy machine is what its neighbours need
    assert statistics.median(delays_s) < 0.5
    assert status["inflight"] == []
    assert status["totals"]["requests"]["499"] == 11
    assert status["totals"]["upstream_losses"] == {}


async def test_one_that_leaves_the_queue_makes_room(run_dir: Path) -> None:
    """Its place is free at once and it never reaches the engine."""
    async with appliance(run_dir, max_running=1) as (running, _):
        running_one = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 0.5}))
        await running.until(lambda status: status["slots"]["in_use"] == 1, "one runs")
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "never"})
            await running.until(lambda status: status["queue"]["length"] == 1, "one waits")
        await running.until(lambda status: status["queue"]["length"] == 0, "it left")
        assert (await running_one).status == 200
        assert (await running.post({"do": "whole"})).status == 200
        assert (await _stats(run_dir))["aborted_at"] == []


async def test_a_client_that_sent_the_next_request_early_is_seen_leaving_too(run_dir: Path) -> None:
    """Pipelined: the first is answered, the connection then closed; and one that leaves meanwhile is noticed."""
    async with appliance(run_dir) as (running, _):
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "whole", "delay_s": 0.1, "n": 1})
            connection.send("POST", CHAT, {"do": "whole", "n": 2})
            answer = await connection.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await asyncio.wait_for(connection.reader.read(), 5) == b""
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "never"})
            connection.send("POST", CHAT, {"do": "never"})
            await running.until(lambda status: status["slots"]["in_use"] == 1, "the first runs")
        await running.until(lambda status: status["slots"]["in_use"] == 0, "it was noticed")
        assert (await _stats(run_dir))["requests"] == 3  # /stats is one; the second of each pair was never looked at


async def test_it_is_reported_as_a_client_that_left(run_dir: Path) -> None:
    """So that diagnosis can tell it from a crash."""
    async with appliance(run_dir) as (running, scripted):
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "never"})
            await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
        await running.until(lambda _: scripted.reports, "the report")
    assert [report["kind"] for report in scripted.reports] == ["client_disconnect"]
    assert scripted.reports[0]["requests"][0]["path"] == CHAT


async def test_a_thousand_random_departures_leave_nothing(run_dir: Path) -> None:
    """Leaving at any moment, the gateway's count and the engine's are both zero afterwards."""
    generator = random.Random(7)

    async def one(running: GatewayProcess) -> None:
        async with running.connection() as connection:
            stream = generator.random() < 0.5
            kind, delay_s = "stream" if stream else "whole", generator.random() * 0.03
            connection.send("POST", CHAT, {"do": kind, "stream": stream, "events": 20, "gap_s": 0.002, "delay_s": delay_s})
            await asyncio.sleep(generator.random() * 0.06)
            if generator.random() < 0.3:
                _reset(connection)

    async with appliance(run_dir) as (running, _):
        for _ in range(40):
            await asyncio.gather(*(one(running) for _ in range(25)))
        status = await running.until(lambda status: not status["inflight"], "all have ended")
        stats = await _stats(run_dir)
        assert (await running.post({"do": "whole"})).status == 200
        journal = running.log.read_text()
    assert status["slots"]["in_use"] == status["queue"]["length"] == 0
    assert stats["open"] == 0
    assert status["totals"]["upstream_losses"] == {}
    assert "Traceback" not in journal


async def test_a_leaving_client_is_seen_behind_a_large_body(run_dir: Path) -> None:
    """uvicorn stops reading after 64 KiB; the end of the connection must be read all the same."""
    async with appliance(run_dir) as (running, _):
        async with running.connection() as connection:
            connection.send("POST", CHAT, {"do": "never", "filler": "x" * 3_000_000})
            await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
        await running.until(lambda status: status["slots"]["in_use"] == 0, "the slot is free")
