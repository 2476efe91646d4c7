"""What the gateway costs: CPU a request and a chunk, added time to the first token, memory, time to listen.

    python tests/bench/gateway.py [--requests N] [--json]

The upstream is tests/fakes/upstream.py on a unix socket; the client is this process. CPU is the gateway process's own
(/proc/PID/schedstat, nanoseconds), so the load of the machine does not count. The median of several rounds is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.scripted_appliance import Connection, GatewayProcess, appliance, gateway

ROUNDS = 5
STREAM_EVENTS = 50
GOALS = {"cpu_ms_per_request": 0.20, "cpu_us_per_paced_chunk": 80.0, "added_ttft_ms": 1.0, "pss_mib": 40.0, "listens_after_s": 1.5}
PATH = "/v1/chat/completions"


def cpu_ns(pid: int) -> int:
    """Time on a CPU, all threads."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def pss_mib(pid: int) -> float:
    """Proportional set size."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) / 1024


async def per_unit(pid: int, units: int, work: Callable[[], Awaitable[None]]) -> float:
    """Median over the rounds of the process's CPU nanoseconds a unit."""
    figures = []
    for _ in range(ROUNDS):
        before = cpu_ns(pid)
        await work()
        figures.append((cpu_ns(pid) - before) / units)
    return statistics.median(figures)


async def ask_many(connection: Connection, count: int) -> None:
    """Whole answers, one after the other, on one connection."""
    for _ in range(count):
        answer = await connection.ask("POST", PATH, {"do": "whole", "bytes": 256, "messages": [{"role": "user", "content": "x" * 200}]})
        assert answer.status == 200


async def stream_many(running: GatewayProcess, streams: int, gap_s: float, events: int) -> None:
    """Streams side by side."""

    async def one() -> None:
        body = {"do": "stream", "stream": True, "events": events, "gap_s": gap_s, "role": True, "temperature": 0}  # with the resume log
        answer = await running.post(body)
        assert answer.complete
        assert len(answer.events()) == events + 2

    await asyncio.gather(*(one() for _ in range(streams)))


async def first_token_ms(connect: Callable[[], Awaitable[Connection]], count: int) -> float:
    """Median time from a request to its first content event, on a kept connection."""
    connection = await connect()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        connection.send("POST", PATH, {"do": "stream", "stream": True, "events": 2, "gap_s": 0.001, "role": True})
        await connection.head()
        while b" t0 " not in await connection.chunk():
            pass
        taken.append(time.perf_counter() - began)
        while await connection.chunk():
            pass
    connection.writer.close()
    return statistics.median(taken) * 1000


async def measure(requests: int) -> dict[str, float]:
    """All figures."""
    run_dir = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        began = time.perf_counter()
        async with gateway(run_dir) as lonely:
            found = {"listens_after_s": time.perf_counter() - began, "pss_idle_mib": pss_mib(lonely.process.pid)}
        async with appliance(run_dir) as (running, scripted):
            pid = running.process.pid
            async with running.connection() as connection:
                await ask_many(connection, 200)
                found["cpu_ms_per_request"] = await per_unit(pid, requests, lambda: ask_many(connection, requests)) / 1e6
                began = time.perf_counter()
                await ask_many(connection, requests)
                found["requests_per_s_one_client"] = requests / (time.perf_counter() - began)
            paced = await per_unit(pid, 8 * STREAM_EVENTS, lambda: stream_many(running, 8, 0.02, STREAM_EVENTS))
            found["cpu_us_per_paced_chunk"] = paced / 1000
            saturated = await per_unit(pid, 8 * 2000, lambda: stream_many(running, 8, 0.0, 2000))
            found["cpu_us_per_saturated_chunk"] = saturated / 1000

            async def through() -> Connection:
                return Connection(*await asyncio.open_connection("127.0.0.1", running.port))

            async def direct() -> Connection:
                return Connection(*await asyncio.open_unix_connection(str(run_dir / f"engine-{scripted.generation}.sock")))

            found["ttft_direct_ms"] = await first_token_ms(direct, 200)
            found["added_ttft_ms"] = await first_token_ms(through, 200) - found["ttft_direct_ms"]
            found["pss_mib"] = pss_mib(pid)
        return found
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def main() -> int:
    """Print the figures; 1 when one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000, help="a round [default: %(default)s]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options.requests))
    missed = [name for name, goal in GOALS.items() if found[name] > goal]
    if options.json:
        print(json.dumps({"figures": found, "goals": GOALS, "missed": missed}))
    else:
        for name, value in found.items():
            goal = f"   goal {GOALS[name]:g}{'  MISSED' if name in missed else ''}" if name in GOALS else ""
            print(f"{name:28} {value:10.3f}{goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
