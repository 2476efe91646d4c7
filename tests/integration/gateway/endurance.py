"""The gateway for a long time: memory over many requests, rubbish by the megabyte, clients that come and go.

    python tests/integration/gateway/endurance.py memory [--requests 100000]
    python tests/integration/gateway/endurance.py fuzz [--megabytes 100] [--seed N]
    python tests/integration/gateway/endurance.py leave [--requests 1000] [--at-once 24] [--patience-s 0.5] [--model DIR]

A real gateway process in front of tests/fakes/upstream.py; `leave`: `appliancectl run` with the built-in engine. Prints what it
found; exit code 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fakes.scripted_appliance import Connection, GatewayProcess, appliance

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
CLIENTS = 8
GROWTH_MAX_KIB = 3 * 1024
"""Between the first tenth, which warms up, and the end. Objects do not grow at all; pages do by what the allocator breaks up: 2 MiB over
400 MB of rubbish, reached after a third of it, and 0.7 MiB over 40,000 requests."""
FUZZERS = 48
PATIENCE_S = 0.1
"""How long a fuzzer waits for an answer to what may be no request."""
PROBE_EVERY_S = 0.25
PROBE_MAX_S = 3.0
"""A page that takes longer means that somebody holds up everybody."""


def pss_kib(pid: int) -> int:
    """Proportional set size."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))


def descriptors(pid: int) -> int:
    """Open files."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


# memory


async def one_request(running: GatewayProcess, kept: list[Connection], draw: random.Random) -> None:
    """Whole, streamed, refused, or left by its client; mostly on a kept connection."""
    kind = draw.random()
    if kind < 0.05:
        async with running.connection() as leaving:
            leaving.send("POST", CHAT, {"do": "stream", "stream": True, "events": 50, "gap_s": 0.01})
            await leaving.head()
        return
    if not kept:
        kept.append(Connection(*await asyncio.open_connection("127.0.0.1", running.port)))
    words = "x" * draw.randrange(20, 4000)
    if kind < 0.35:
        body: Json = {"do": "stream", "stream": True, "events": draw.randrange(2, 9), "role": True, "temperature": 0, "said": words}
        answer = await kept[0].ask("POST", CHAT, body)
        assert answer.events()[-1] == "[DONE]"
    elif kind < 0.40:
        answer = await kept[0].ask("POST", CHAT, b'{"broken": ', x_request_id=f"id-{draw.random()}")
        assert answer.status == 400
    elif kind < 0.42:
        assert (await kept[0].ask("GET", f"/nothing/{draw.random()}")).status == 404
    elif kind < 0.43:
        assert (await kept[0].ask("GET", "/metrics")).status == 200
    else:
        assert (await kept[0].ask("POST", CHAT, {"do": "whole", "bytes": draw.randrange(10, 3000), "said": words})).status == 200
    if answer_ends_connection(kept[0]):
        kept.pop().writer.close()


def answer_ends_connection(connection: Connection) -> bool:
    """The gateway has closed it."""
    return connection.reader.at_eof()


async def memory(requests: int) -> list[int]:
    """PSS at every tenth."""
    run_dir = Path(tempfile.mkdtemp(prefix="gw-"))
    try:
        async with appliance(run_dir, "metrics.traffic_days=30") as (running, _):
            samples: list[int] = []

            async def client(count: int, seed: int) -> None:
                kept: list[Connection] = []
                draw = random.Random(seed)
                for _ in range(count):
                    await one_request(running, kept, draw)
                for connection in kept:
                    connection.writer.close()

            for tenth in range(10):
                await asyncio.gather(*(client(requests // 10 // CLIENTS, 100 * tenth + each) for each in range(CLIENTS)))
                await running.until(lambda status: not status["inflight"], "all have ended")
                samples.append(pss_kib(running.process.pid))
            assert "Traceback" not in running.log.read_text()
            return samples
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


# fuzz

SEEDS = [
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n{"do":"whole"}',
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: 5\r\nx-priority: low\r\ncontent-length: 48\r\n\r\n"
    b'{"do":"stream","stream":true,"events":5,"seed":1}',
    b'POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"do"\r\n9\r\n:"whole"}\r\n0\r\n\r\n',
    b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /v1/models HTTP/1.0\r\nconnection: keep-alive, upgrade\r\nupgrade: websocket\r\n\r\n",
    b"GET /status HTTP/1.1\r\nhost: x\r\nx-request-id: a.b:c-d\r\norigin: http://evil\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n\r\nCONNECT a:1 HTTP/1.1\r\n\r\nHEAD /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://other/status?x=%ff HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n12",
    b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: 99999999999\r\n\r\n\x1f\x8b",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
TOKENS = [
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\x00",
    b"\xff",
    b": ",
    b"%2e%2e/",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"{",
    b"[" * 50,
    b'"\\ud800"',
    b"chunked",
]


def mutated(draw: random.Random) -> bytes:
    """One to three seeds, spliced, with some of their bytes changed, and often a long tail of noise or of JSON."""
    data = bytearray(b"".join(draw.choice(SEEDS) for _ in range(draw.choice((1, 1, 1, 2, 3)))))
    for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[at:at] = draw.choice(TOKENS)
            case 1:
                del data[at : at + draw.randrange(1, 20)]
            case 2 if at < len(data):
                data[at] = draw.randrange(256)
            case _:
                piece = data[at : at + draw.randrange(1, 60)]
                data[at:at] = piece * draw.randrange(1, 5)
    tail = draw.random()
    if tail < 0.3:
        data += draw.randbytes(draw.randrange(1, 40_000))
    elif tail < 0.6:
        body = json.dumps({"messages": [{"role": "user", "content": "é" * draw.randrange(20_000)}], "do": "whole"}).encode()
        body = body[: draw.randrange(len(body))] if draw.random() < 0.3 else body
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        data = bytearray(head + body + data)
    return bytes(data)


@dataclass
class Fuzzed:
    """What came of it."""

    sent_bytes: int = 0
    connections: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_page_s: float = 0.0
    pss_kib: list[int] = field(default_factory=list)
    """At each tenth."""
    grown_descriptors: int = 0
    problems: list[str] = field(default_factory=list)


async def throw(running: GatewayProcess, data: bytes, draw: random.Random, found: Fuzzed) -> None:
    """Send, sometimes in pieces, read what comes, and leave in one of the ways in which clients leave."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    except OSError as error:
        found.problems.append(f"cannot connect: {error}")
        return
    got = b""
    try:
        cut = draw.randrange(len(data) + 1) if draw.random() < 0.3 else len(data)
        writer.write(data[:cut])
        if cut < len(data):
            await asyncio.sleep(0.001)
            writer.write(data[cut:])
        if draw.random() < 0.3 and writer.can_write_eof():
            writer.write_eof()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while piece := await reader.read(65536):
                    got += piece
    except OSError:  # the gateway has hung up already
        pass
    finally:
        writer.transport.abort() if draw.random() < 0.5 else writer.close()
    found.sent_bytes += len(data)
    found.connections += 1
    if got.startswith(b"HTTP/1.1 "):
        found.statuses[int(got[9:12])] += 1
    elif got:
        found.problems.append(f"{got[:60]!r} for {data[:60]!r}")


async def probe(running: GatewayProcess, found: Fuzzed) -> None:
    """A page now and then, as a load balancer asks for it."""
    while True:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(30):
                status = (await running.ask("GET", "/health")).status
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            found.problems.append(f"/health: {error!r}")
        else:
            found.slowest_page_s = max(found.slowest_page_s, time.monotonic() - began_s)
            if status not in (200, 503):  # what the fuzz asks of the engine breaks connections to it now and then
                found.problems.append(f"/health says {status}")
        await asyncio.sleep(PROBE_EVERY_S)


async def fuzz(total_bytes: int, seed: int) -> Fuzzed:
    """Until so many bytes are sent; then all must be as before."""
    run_dir = Path(tempfile.mkdtemp(prefix="gw-"))
    found = Fuzzed()
    try:
        async with appliance(run_dir, "gateway.header_timeout_s=2") as (running, _):

            async def fuzzer(number: int, until_bytes: int) -> None:
                draw = random.Random(seed * 1000 + number)
                while found.sent_bytes < until_bytes and len(found.problems) < 20:
                    await throw(running, mutated(draw), draw, found)

            async def all_of_them(until_bytes: int, first: int) -> None:
                await asyncio.gather(*(fuzzer(first + number, until_bytes) for number in range(FUZZERS)))
                await running.until(lambda status: not status["inflight"] and not status["queue"]["length"], "nothing is in flight")

            watching = asyncio.create_task(probe(running, found))
            pid = running.process.pid
            await all_of_them(total_bytes // 10, 0)
            before_descriptors = await settled_descriptors(pid)
            found.pss_kib.append(pss_kib(pid))
            for tenth in range(2, 11):
                await all_of_them(total_bytes * tenth // 10, tenth * FUZZERS)
                found.pss_kib.append(pss_kib(pid))
            found.grown_descriptors = await settled_descriptors(pid) - before_descriptors
            watching.cancel()
            if (await running.post({"do": "whole"})).status != 200:
                found.problems.append("it does not answer any more")
            log = running.log.read_text()
            if "Traceback" in log or "defect" in log:
                found.problems.append(log[log.find("Traceback") - 500 :][:3000])
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    grown_kib = found.pss_kib[-1] - found.pss_kib[0] if found.pss_kib else 0
    found.problems += [f"it grew by {grown_kib} KiB"] if grown_kib > GROWTH_MAX_KIB else []
    found.problems += [f"it kept {found.grown_descriptors} more descriptors"] if found.grown_descriptors > CLIENTS else []
    found.problems += [f"a page took {found.slowest_page_s:.1f} s"] if found.slowest_page_s > PROBE_MAX_S else []
    return found


# leave


async def leave_at_random(port: int, model: str, patience_s: float, draw: random.Random) -> None:
    """Ask, and be gone by then: in the queue, in the prefill, in the middle, or when it is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = "Tell me about rivers. " * draw.choice((1, 1, 5, 40))
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "stream": draw.random() < 0.6, "max_tokens": draw.choice((1, 8, 64)), "temperature": 0}
    Connection(reader, writer).send("POST", CHAT, body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s * draw.choice((0.0, 0.02, 0.1, 0.4, 1.0)) * draw.random()):
            while await reader.read(65536):
                pass
    writer.transport.abort() if draw.random() < 0.5 else writer.close()


async def counts_when_quiet(port: int, socket_path: str) -> tuple[Json, Json]:
    """The gateway's slots and queue, and the engine's running and waiting, when both are still; or after five seconds."""
    due_s = time.monotonic() + 5
    while True:
        status = (await Connection(*await asyncio.open_connection("127.0.0.1", port)).ask("GET", "/status")).json()
        health = (await Connection(*await asyncio.open_unix_connection(socket_path)).ask("GET", "/health")).json()
        ours = {"in_use": status["slots"]["in_use"], "queue": status["queue"]["length"], "inflight": len(status["inflight"])}
        theirs = {name: health[name] for name in ("running", "waiting")}
        if not any((*ours.values(), *theirs.values())) or time.monotonic() > due_s:
            return ours, theirs


async def leave(url: str, model: str, engine_socket: str, requests: int, at_once: int, patience_s: float) -> list[str]:
    """What is wrong afterwards."""
    port = int(url.rpartition(":")[2])
    draw = random.Random(11)

    async def client(count: int) -> None:
        for _ in range(count):
            await leave_at_random(port, model, patience_s, draw)

    await asyncio.gather(*(client(requests // at_once + 1) for _ in range(at_once)))
    ours, theirs = await counts_when_quiet(port, engine_socket)
    page = (await Connection(*await asyncio.open_unix_connection(engine_socket)).ask("GET", "/metrics")).body.decode()
    ends = [line for line in page.splitlines() if line.startswith("appliance_engine_requests_total") and "chat" in line]
    print(f"gateway {ours}, engine {theirs}", *ends, sep="\n")
    return [f"{who}: {counts}" for who, counts in (("gateway", ours), ("engine", theirs)) if any(counts.values())]


def run_leave(requests: int, at_once: int, patience_s: float, model_dir: Path) -> list[str]:
    """With an appliance of its own."""
    from tests.integration.conftest import Foreground

    with tempfile.TemporaryDirectory(prefix="leave-") as folder:
        run = Foreground(Path(folder), "--model", str(model_dir), "--port", "0")
        try:
            model, url = run.wait_until_serving()
            generation = run.status()["generation"]
            socket_path = str((run.state_dir / "run").resolve() / f"engine-{generation}.sock")
            problems = asyncio.run(leave(url, model, socket_path, requests, at_once, patience_s))
            if run.status()["generation"] != generation:
                problems.append("the engine has died")
        finally:
            run.stop()
    return problems


async def settled_descriptors(pid: int) -> int:
    """Once connections that were left have been given up: the fewest within a few seconds."""
    fewest = descriptors(pid)
    for _ in range(40):
        await asyncio.sleep(0.1)
        fewest = min(fewest, descriptors(pid))
    return fewest


def main() -> int:
    """Exit code 1 when a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("memory").add_argument("--requests", type=int, default=100_000)
    fuzzing = what.add_parser("fuzz")
    fuzzing.add_argument("--megabytes", type=float, default=100.0)
    fuzzing.add_argument("--seed", type=int, default=1)
    leaving = what.add_parser("leave")
    leaving.add_argument("--requests", type=int, default=1000)
    leaving.add_argument("--at-once", type=int, default=24, help="clients; at most eight at a time are with the engine")
    leaving.add_argument("--patience-s", type=float, default=0.5)
    leaving.add_argument("--model", type=Path, default=Path(__file__).parents[3] / ".cache/models/SmolLM2-135M-Instruct")
    options = parser.parse_args()
    began_s = time.monotonic()
    if options.what == "leave":
        problems = run_leave(options.requests, options.at_once, options.patience_s, options.model)
        print(*problems, f"in {time.monotonic() - began_s:.0f} s", sep="\n")
        return 1 if problems else 0
    if options.what == "memory":
        samples = asyncio.run(memory(options.requests))
        grown_kib = samples[-1] - samples[0]
        print(
            f"{options.requests} requests in {time.monotonic() - began_s:.0f} s; PSS in KiB at each tenth: {samples}; grown by {grown_kib}"
        )
        return 1 if grown_kib > GROWTH_MAX_KIB else 0
    found = asyncio.run(fuzz(int(options.megabytes * 1e6), options.seed))
    print(f"{found}\nin {time.monotonic() - began_s:.0f} s")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
