"""What clients see when the only engine is killed under their streams and is back two seconds later.

    python tests/bench/crash.py [--streams N] [--away-s S] [--peers FOLDER] [--llama-swap PATH] [--json]

The engine is tests/fakes/upstream.py, killed with SIGKILL in the middle of paced streams and started again where it was.
With --peers, the same is done to other gateways, installed into that folder. llama-swap starts its engine itself: there, the engine
comes up when it is back, however early llama-swap has begun to start it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import _llama_swap, _peers
from tests.bench.gateway import PATH, WHOLE, streamed
from tests.fakes.scripted_appliance import ROOT, Connection, appliance, free_port

EVENTS = 120
GAP_S = 0.02
KILL_AFTER_S = 0.8
PATIENCE_S = 90.0
"""sglang-router looks at its workers once a minute."""


@dataclass(frozen=True)
class Rig:
    """A gateway, and its engine's death and return."""

    port: int
    kill: Callable[[], Awaitable[None]]
    start: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Seen:
    """`streams`: how they ended → how many; `tokens_wrong`: lost or doubled; `again_s`: from the kill to the next 200."""

    streams: dict[str, int]
    tokens_wrong: int
    again_s: float

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {how}" for how, count in self.streams.items())
        return f"{ends}; tokens lost or doubled: {self.tokens_wrong}; 200 again {self.again_s:.1f} s after the kill"


async def one_stream(port: int) -> tuple[str, int]:
    """How it ended, and how many tokens are missing or there twice."""
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await connection.ask("POST", PATH, streamed(EVENTS, GAP_S), content_type="application/json")
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        return f"broken ({type(error).__name__})", EVENTS
    finally:
        connection.writer.close()
    tokens = Counter(int(number) for number in re.findall(rb'"content": ?" t(\d+) ', answer.body))
    wrong = sum(abs(tokens[number] - 1) for number in range(EVENTS))
    if answer.status != 200:
        return f"refused with {answer.status}", wrong
    if not answer.complete:
        return "broken", wrong
    if b"[DONE]" in answer.body and not wrong:
        return "whole", wrong
    return "ended with an error event" if b'"error"' in answer.body else "short and clean: silently cut", wrong


async def until_200(port: int, since_s: float) -> float:
    """How long until a new client is answered."""
    while time.monotonic() - since_s < PATIENCE_S:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
            async with asyncio.timeout(PATIENCE_S):
                answer = await connection.ask("POST", PATH, WHOLE, content_type="application/json")
            connection.writer.close()
            if answer.status == 200:
                return time.monotonic() - since_s
        await asyncio.sleep(0.1)
    return float("inf")


async def look(rig: Rig, streams: int, away_s: float) -> Seen:
    """One crash."""
    running = [asyncio.create_task(one_stream(rig.port)) for _ in range(streams)]
    await asyncio.sleep(KILL_AFTER_S)
    killed_s = time.monotonic()
    await rig.kill()
    asking = asyncio.create_task(until_200(rig.port, killed_s))
    await asyncio.sleep(away_s)
    await rig.start()
    ends = await asyncio.gather(*running)
    return Seen(dict(Counter(how for how, _ in ends)), sum(wrong for _, wrong in ends), await asking)


@contextlib.asynccontextmanager
async def ours(run_dir: Path) -> AsyncIterator[Rig]:
    """A gateway process; applianced's publications are scripted."""
    async with appliance(run_dir, max_running=64) as (running, scripted):

        async def start() -> None:
            await scripted.start_engine()

        yield Rig(running.port, scripted.crash, start)


@contextlib.asynccontextmanager
async def theirs(peer: _peers.Peer, programs: Path, folder: Path) -> AsyncIterator[Rig]:
    """Another gateway, with the engine on a port."""
    port = free_port()
    engines: list[asyncio.subprocess.Process] = []

    async def start() -> None:
        argv = (sys.executable, str(ROOT / "tests/fakes/upstream.py"), "--port", str(port))
        engines.append(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE))
        stdout = engines[-1].stdout
        assert stdout is not None
        await stdout.readline()

    async def kill() -> None:
        engines[-1].kill()
        await engines[-1].wait()

    await start()
    try:
        async with _peers.running(peer, programs, port, folder) as (_, own_port):
            yield Rig(own_port, kill, start)
    finally:
        await kill() if engines[-1].returncode is None else None


@contextlib.asynccontextmanager
async def under_llama_swap(program: str, folder: Path) -> AsyncIterator[Rig]:
    """The engine as llama-swap's own child."""
    port, away = free_port(), folder / "away"

    def command(engine_port: int) -> list[str]:
        engine = shlex.join([sys.executable, str(ROOT / "tests/fakes/upstream.py"), "--port", str(engine_port)])
        return ["/bin/sh", "-c", f"while test -e {away}; do sleep 0.05; done; exec {engine}"]

    with _llama_swap.running(program, command, port, folder) as engines:

        async def kill() -> None:
            away.touch()
            for engine in engines():
                engine.kill()

        async def start() -> None:
            away.unlink()

        await until_200(port, time.monotonic())
        yield Rig(port, kill, start)


async def seen_by_all(programs: dict[_peers.Peer, Path], llama_swap: str | None, streams: int, away_s: float) -> dict[str, Seen]:
    """One after the other."""
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    try:
        async with ours(folder) as rig:
            found = {"ours": await look(rig, streams, away_s)}
        for peer, path in programs.items():
            async with theirs(peer, path, folder) as rig:
                found[peer.name] = await look(rig, streams, away_s)
        if llama_swap:
            async with under_llama_swap(llama_swap, folder) as rig:
                found["llama-swap"] = await look(rig, streams, away_s)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """1 when one of our streams was not whole."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--away-s", type=float, default=2.0)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="look at other gateways too, installed there")
    parser.add_argument("--llama-swap", metavar="PATH", default=shutil.which("llama-swap"), help="the program, to look at it too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    programs = {peer: _peers.installed(peer, options.peers) for peer in _peers.PEERS} if options.peers else {}
    found = asyncio.run(seen_by_all(programs, options.llama_swap, options.streams, options.away_s))
    if options.json:
        print(json.dumps({name: asdict(seen) for name, seen in found.items()}))
    else:
        print(*(f"{name:16}{seen}" for name, seen in found.items()), sep="\n")
    return 0 if found["ours"].streams == {"whole": options.streams} else 1


if __name__ == "__main__":
    sys.exit(main())
