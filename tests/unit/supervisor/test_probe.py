"""Asking an engine over HTTP: servers that answer well, badly, slowly, endlessly or not at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import OWN_VOICE, Counters, Voice, llamacpp, sglang, vllm
from appliance.backends.native import PROOF
from appliance.backends.protocol import ProofRequest
from appliance.core.launch import Endpoint, EngineLimits, LaunchSpec
from appliance.supervisor.hang import Hang, HangLimits
from appliance.supervisor.http_get import Answer, NoAnswer, exchange
from appliance.supervisor.probe import Listener, Prober, ProbeSettings, limits_of, prove
from tests.unit.supervisor.machine_cases import LADDER


@asynccontextmanager
async def server(folder: Path, *answers: bytes, pause_s: float = 0.0) -> AsyncIterator[Endpoint]:
    """Gives these answers, one a connection, the last one for ever."""
    queue = list(answers)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(pause_s)
        writer.write(queue.pop(0) if len(queue) > 1 else queue[0])
        writer.close()

    listening = await asyncio.start_unix_server(talk, folder / "s")
    try:
        yield Endpoint(socket_path=str(folder / "s"))
    finally:
        listening.close()


def ok(body: object, status: int = 200) -> bytes:
    """A whole JSON answer."""
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data)


def spec_of(endpoint: Endpoint) -> LaunchSpec:
    """A spec whose endpoint is the server."""
    return LaunchSpec(("x",), {}, "/", endpoint, "/health", 5.0, 5.0, "native", LADDER[0])


async def test_a_good_answer(tmp_path: Path) -> None:
    """Status and JSON, with a content length or in chunks."""
    chunked = b'HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n8\r\n{"a": 1}\r\n0\r\n\r\n'
    async with server(tmp_path, ok({"b": 2}), chunked) as endpoint:
        assert (await exchange(endpoint, "/health", 5.0)).json() == {"b": 2}
        answer = await exchange(endpoint, "/health", 5.0)
        assert (answer.status, answer.json()) == (503, {"a": 1})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nshort", "/health"),
        (b"", "/health"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000, "over 1048576 bytes"),
    ],
)
async def test_bad_answers_are_no_answer(tmp_path: Path, answer: bytes, words: str) -> None:
    """Another protocol, a broken body, a silent close, an endless body: a reason, never an exception of somebody else's."""
    async with server(tmp_path, answer) as endpoint:
        with pytest.raises(NoAnswer, match=words):
            await exchange(endpoint, "/health", 5.0)


async def test_deadline_and_absence(tmp_path: Path) -> None:
    """Too late and nobody there are told apart."""
    async with server(tmp_path, ok({}), pause_s=5.0) as endpoint:
        began_s = time.monotonic()
        with pytest.raises(NoAnswer, match=r"within 0\.1 s"):
            await exchange(endpoint, "/health", 0.1)
        assert time.monotonic() - began_s < 2
    with pytest.raises(NoAnswer, match="No such file"):
        await exchange(Endpoint(socket_path=str(tmp_path / "nobody")), "/health", 1.0)
    with pytest.raises(NoAnswer, match=r"refused|Connect call failed"):
        await exchange(Endpoint(port=1), "/health", 1.0)


TWO = (ProofRequest("/a", {}, lambda answer: bool(answer.get("choices"))), PROOF)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([ok({"choices": [1]})], None),
        ([ok({}, 404), ok({"text": " x", "output_ids": [1], "meta_info": {}})], None),
        ([ok({"choices": []})], "without a token"),
        ([ok({"error": "cuda"}, 500)], "answered 500"),
        ([ok({}, 404)], "knows none of /a, /generate"),
        ([b"nonsense\r\n\r\n"], "not HTTP"),
    ],
)
async def test_the_proof(tmp_path: Path, answers: list[bytes], problem: str | None) -> None:
    """One completion with a token in it, by the first endpoint that the engine knows; everything else is told as it is."""
    async with server(tmp_path, *answers) as endpoint:
        found = await prove(spec_of(endpoint), TWO, 5.0)
    assert found is None if problem is None else found is not None and problem in found


def test_limits_of_an_engine_that_says_nothing() -> None:
    """A foreign engine's bare 200: what was configured counts; nonsense in the numbers too."""
    fallback = EngineLimits("demo", 1, 2, 3)
    assert limits_of(Answer(200, b"OK"), fallback) == fallback
    assert limits_of(Answer(200, b'{"limits": {"model_id": "m"}}'), fallback) == fallback
    good = {"model_id": "m", "context_length_tokens": 4, "max_running": 5, "kv_tokens": 6}
    assert limits_of(Answer(200, json.dumps({"limits": good}).encode()), fallback) == EngineLimits("m", 4, 5, 6)


async def test_an_engine_that_waits_for_us_to_read_its_log_is_given_the_ceiling(tmp_path: Path) -> None:
    """A flood of its log stops its steps until we have read it: that is our slowness, for as long as it can be ours."""
    unread = [True]
    found: list[Hang] = []
    stuck = ok({"status": "ok", "progress": 5, "running": 1, "waiting": 0})
    async with server(tmp_path, stuck) as endpoint:
        settings = ProbeSettings(0.02, 1.0, HangLimits(0.2, 1.0))
        listener = Listener(lambda _: None, lambda _: None, found.append, lambda _: None)
        began_s = time.monotonic()
        prober = Prober(spec_of(endpoint), settings, EngineLimits("m", 1, 1, 1), lambda: 0.0, listener, lambda: unread[0])
        running = asyncio.create_task(prober.run())
        await asyncio.sleep(0.5)
        assert not found
        unread[0] = False
        await asyncio.wait_for(running, 10)
    assert time.monotonic() - began_s >= 0.6
    assert found[0].running == 1


async def test_an_engine_is_asked_in_its_own_words(tmp_path: Path) -> None:
    """Ready by one path, its limits from another, its counters from a third."""
    asked: list[str] = []
    ready: list[EngineLimits] = []
    heard: list[Counters] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        writer.write(ok({"n": 7}))
        writer.close()

    voice = Voice("/pulse", lambda body: Counters(json.loads(body)["n"]), (("/limits", lambda _, assumed: replace(assumed, kv_tokens=9)),))
    listening = await asyncio.start_unix_server(talk, tmp_path / "s")
    try:
        settings = ProbeSettings(0.01, 1.0, HangLimits(5.0, 5.0), voice=voice)
        listener = Listener(ready.append, heard.append, lambda _: None, lambda _: None)
        prober = Prober(spec_of(Endpoint(socket_path=str(tmp_path / "s"))), settings, EngineLimits("m", 1, 1, 1), lambda: 0.0, listener)
        running = asyncio.create_task(prober.run())
        async with asyncio.timeout(10):
            while len(heard) < 2:
                await asyncio.sleep(0.005)
        running.cancel()
    finally:
        listening.close()
    assert asked[:3] == ["/health", "/limits", "/pulse"]
    assert ready == [EngineLimits("m", 1, 1, 9)]
    assert heard[0].progress == 7


async def test_an_engine_that_counts_whole_batches_may_compute_one_for_long(tmp_path: Path) -> None:
    """While it uses the CPU, a batch is no hang before the ceiling; when it does not, the floor counts."""
    found: list[Hang] = []
    cpu_s = itertools.count()
    async with server(tmp_path, ok({"progress": 5, "running": 1})) as endpoint:
        voice = replace(OWN_VOICE, whole_batches=True)
        settings = ProbeSettings(0.02, 1.0, HangLimits(0.1, 0.6), voice=voice)
        listener = Listener(lambda _: None, lambda _: None, found.append, lambda _: None)
        for used_s in (lambda: float(next(cpu_s)), lambda: 0.0):
            prober = Prober(spec_of(endpoint), settings, EngineLimits("m", 1, 1, 1), used_s, listener)
            await asyncio.wait_for(prober.run(), 10)
    assert found[0].silent_s >= 0.6
    assert found[1].silent_s < 0.6


@pytest.mark.parametrize(
    ("voice", "body"),
    [
        (Voice("/pulse", vllm.counters_of), b"vllm:num_requests_running{} 1\nvllm:kv_cache_usage_perc{} NaN\n"),
        (Voice("/pulse", llamacpp.counters_of), b"llamacpp:requests_processing inf\n"),
        (Voice("/pulse", sglang.counters_of), b'{"loads": 5}'),
        (Voice("/pulse", sglang.counters_of), b'{"loads": [{"num_running_reqs": 1, "timestamp": Infinity}]}'),
        (OWN_VOICE, b"[" * 100_000),
    ],
)
async def test_numbers_that_are_none_end_no_engine(tmp_path: Path, voice: Voice, body: bytes) -> None:
    """It answers, and what it says makes no sense: nothing is known of it, and nothing is held against it."""
    found: list[Hang] = []
    heard: list[Counters] = []
    answer = b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with server(tmp_path, answer) as endpoint:
        settings = ProbeSettings(0.01, 1.0, HangLimits(0.1, 0.2), voice=voice)
        listener = Listener(lambda _: None, heard.append, found.append, lambda _: None)
        prober = Prober(spec_of(endpoint), settings, EngineLimits("m", 1, 1, 1), lambda: 0.0, listener)
        running = asyncio.create_task(prober.run())
        async with asyncio.timeout(10):
            while len(heard) < 30:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        running.cancel()
    assert found == []
    assert set(heard) == {Counters()}
