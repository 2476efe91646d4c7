"""What the gateway costs: CPU a request and a chunk, added time to the first token, memory, time to listen.

    python tests/bench/gateway.py [--requests N] [--peers FOLDER] [--json]

The upstream is tests/fakes/upstream.py; the client is this process. CPU is the gateway's own processes'
(/proc/PID/schedstat, nanoseconds), so the load of the machine does not count. The median of several rounds is printed.
With --peers, other gateways are installed into that folder and measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import _peers
from tests.fakes.scripted_appliance import ROOT, Answer, Connection, appliance, free_port, gateway

ROUNDS = 5
STREAM_EVENTS = 50
SATURATED_EVENTS = 2000
GOALS = {"cpu_ms_per_request": 0.20, "cpu_us_per_paced_chunk": 80.0, "added_ttft_ms": 1.0, "pss_mib": 40.0, "listens_after_s": 1.5}
PATH = "/v1/chat/completions"
Figures = dict[str, float]


def asked(orders: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat request whose message says what the upstream is to do: every gateway passes that on."""
    return {"model": _peers.MODEL, "messages": [{"role": "user", "content": json.dumps(orders)}], "temperature": 0, **fields}


_MESSAGE = {"role": "assistant", "content": "x" * 100}
_ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": _peers.MODEL,
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 30, "completion_tokens": 25, "total_tokens": 55},
}
WHOLE = asked({"do": "whole", "body": json.dumps(_ANSWER)})


def streamed(events: int, gap_s: float) -> dict[str, Any]:
    """The same as a stream."""
    return asked({"do": "stream", "events": events, "gap_s": gap_s, "role": True}, stream=True)


@dataclass(frozen=True)
class Target:
    """A gateway that runs."""

    pid: int
    port: int

    @property
    def pids(self) -> list[int]:
        """All of its processes."""
        return _peers.tree(self.pid)

    @property
    def cpu_ns(self) -> int:
        """Time on a CPU, all threads of all processes."""
        return sum(int((task / "schedstat").read_text().split()[0]) for pid in self.pids for task in Path(f"/proc/{pid}/task").iterdir())

    @property
    def pss_mib(self) -> float:
        """Proportional set size."""
        lines = [line for pid in self.pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    async def connect(self) -> Connection:
        """A client's connection."""
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port))


async def per_unit(target: Target, units: int, work: Callable[[], Awaitable[object]]) -> float:
    """Median over the rounds of the CPU nanoseconds a unit."""
    figures = []
    for _ in range(ROUNDS):
        before = target.cpu_ns
        await work()
        figures.append((target.cpu_ns - before) / units)
    return statistics.median(figures)


async def ask_many(target: Target, count: int) -> None:
    """Whole answers, one after the other, on one connection."""
    connection = await target.connect()
    for _ in range(count):
        answer = await connection.ask("POST", PATH, WHOLE, content_type="application/json")
        assert answer.status == 200, answer.body
    connection.writer.close()


async def stream_many(target: Target, streams: int, gap_s: float, events: int) -> None:
    """Streams side by side."""

    async def one() -> Answer:
        connection = await target.connect()
        answer = await connection.ask("POST", PATH, streamed(events, gap_s), content_type="application/json")
        connection.writer.close()
        return answer

    for answer in await asyncio.gather(*(one() for _ in range(streams))):
        assert answer.complete, answer.body[-300:]
        assert b" t%d " % (events - 1) in answer.body, answer.body[-300:]


async def first_token_ms(connection: Connection, count: int) -> float:
    """Median time from a request to its first content event, on a kept connection."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        connection.send("POST", PATH, streamed(2, 0.001), content_type="application/json")
        await connection.head()
        while b" t0 " not in await connection.chunk():
            pass
        taken.append(time.perf_counter() - began)
        while await connection.chunk():
            pass
    connection.writer.close()
    return statistics.median(taken) * 1000


async def measure(target: Target, direct: Callable[[], Awaitable[Connection]], requests: int) -> Figures:
    """What every gateway can be asked."""
    found: Figures = {}
    await ask_many(target, min(200, requests))
    found["cpu_ms_per_request"] = await per_unit(target, requests, lambda: ask_many(target, requests)) / 1e6
    began = time.perf_counter()
    await ask_many(target, requests)
    found["requests_per_s_one_client"] = requests / (time.perf_counter() - began)
    paced = await per_unit(target, 8 * STREAM_EVENTS, lambda: stream_many(target, 8, 0.02, STREAM_EVENTS))
    found["cpu_us_per_paced_chunk"] = paced / 1000
    events = min(SATURATED_EVENTS, 2 * requests)
    found["cpu_us_per_saturated_chunk"] = await per_unit(target, 8 * events, lambda: stream_many(target, 8, 0.0, events)) / 1000
    count = min(200, requests)
    found["ttft_direct_ms"] = await first_token_ms(await direct(), count)
    found["added_ttft_ms"] = await first_token_ms(await target.connect(), count) - found["ttft_direct_ms"]
    found["pss_mib"] = target.pss_mib
    return found


async def measure_ours(requests: int) -> Figures:
    """With the resume log on (temperature 0), as it comes."""
    run_dir = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        began = time.perf_counter()
        async with gateway(run_dir) as lonely:
            listens_after_s = time.perf_counter() - began
            pss_idle_mib = Target(lonely.process.pid, lonely.port).pss_mib
        async with appliance(run_dir) as (running, scripted):

            async def direct() -> Connection:
                return Connection(*await asyncio.open_unix_connection(str(run_dir / f"engine-{scripted.generation}.sock")))

            figures = await measure(Target(running.process.pid, running.port), direct, requests)
        return {"listens_after_s": listens_after_s, "pss_idle_mib": pss_idle_mib, **figures}
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


async def measure_peer(peer: _peers.Peer, programs: Path, requests: int) -> Figures:
    """One that is slow is asked less often."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        async with upstream() as port:
            began = time.perf_counter()
            async with _peers.running(peer, programs, port, folder) as (pid, own_port):
                listens_after_s = time.perf_counter() - began

                async def direct() -> Connection:
                    return Connection(*await asyncio.open_connection("127.0.0.1", port))

                target = Target(pid, own_port)
                began = time.perf_counter()
                await ask_many(target, 20)
                slow = (time.perf_counter() - began) / 20 > 0.01
                return {"listens_after_s": listens_after_s, **await measure(target, direct, max(20, requests // 20) if slow else requests)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def upstream(port: int = 0) -> AsyncIterator[int]:
    """The upstream on a port."""
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "tests/fakes/upstream.py"), "--port", str(port), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def show(found: dict[str, Figures], missed: list[str]) -> None:
    """A column a gateway."""
    print(f"{'':28}" + "".join(f"{name:>16}" for name in found))
    for figure in found["ours"]:
        row = "".join(f"{figures[figure]:16.3f}" if figure in figures else f"{'-':>16}" for figures in found.values())
        goal = f"   goal {GOALS[figure]:g}{'  MISSED' if figure in missed else ''}" if figure in GOALS else ""
        print(f"{figure:28}{row}{goal}")


def main() -> int:
    """Print the figures; 1 when one of ours misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000, help="a round [default: %(default)s]")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="measure other gateways too, installed there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    programs = {peer: _peers.installed(peer, options.peers) for peer in _peers.PEERS} if options.peers else {}
    found = {"ours": asyncio.run(measure_ours(options.requests))}
    for peer, folder in programs.items():
        print(f"measuring {peer.name}", file=sys.stderr)
        found[peer.name] = asyncio.run(measure_peer(peer, folder, options.requests))
    missed = [name for name, goal in GOALS.items() if found["ours"][name] > goal]
    if options.json:
        print(json.dumps({"figures": found, "goals": GOALS, "missed": missed}))
    else:
        show(found, missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
