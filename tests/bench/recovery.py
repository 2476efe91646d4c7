"""kill -9 of the engine under a running stream: how long until the stream's next token. One run, one table.

    python tests/bench/recovery.py [--kills 50] [--others 10] [--model DIR] [--supervisord PATH]
                                   [--llama-swap PATH] [--llama-server PATH --gguf FILE] [--json]

Ours is measured with a warm spare and without one, through the gateway: the stream goes on, and its text is compared with the
undisturbed one. Beside it, servers under what people restart them with: a shell loop without any wait, supervisord, llama-swap and
systemd, around our bare engine and around llama.cpp's server. Those lose the stream, so their client asks again at once, every 10 ms,
until a first token comes: the best that a client can do. The table says how the lost streams ended. What is not there is said and left out.

The goal: median under 1.0 s, worst of 50 under 2.0 s, with the spare, on two cores with the demo model.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance.supervisor.spare import memory_of
from tests.bench import _peers
from tests.bench._keepers import Command, Keeper, Servers, keepers
from tests.fakes.scripted_appliance import free_port
from tests.integration.supervisor.harness import Applianced, wait_for

ROOT = Path(__file__).parents[2]
SPARE = "ours, with a warm spare"
GOAL_MEDIAN_S, GOAL_WORST_S = 1.0, 2.0
ANSWER_TOKENS = 160
BEFORE_KILL = (5, 60)
"""Events of the stream before the kill: anywhere in it."""
START_S = 120.0
RETRY_S = 0.01
PHASES = (
    ("the engine failed", "noticed"),
    ("cause", "its group empty, verdict"),
    ("Listening on", "next life listens"),
    ("The engine is ready", "KV pool, ready"),
    ("the engine answers", "probe answered"),
    ("serving again", "canary, published"),
)
"""A word of applianced's or the engine's log, and what had happened by then."""


class SilentlyCut(ConnectionError):
    """A stream that ended as if all were well, without its [DONE]."""


@dataclass
class Result:
    """One row of the table."""

    name: str
    next_token_s: list[float] = field(default_factory=list)
    goes_on: str = "no: asked again"
    ends: Counter[str] = field(default_factory=Counter)
    """Of streams that did not go on: how they ended → how many."""
    phases_ms: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Median, worst, how many, and what became of the stream."""
        times, ends = self.next_token_s, "".join(f", {count} {how}" for how, count in self.ends.most_common())
        return f"{self.name:44}{statistics.median(times):9.2f} s{max(times):9.2f} s{len(times):7}   {self.goes_on}{ends}"


def question(number: int) -> dict[str, Any]:
    """A body whose greedy answer is long enough to be killed in."""
    content = f"Question {number}: list the numbers from one to forty in words, one per line."
    asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "stream": True}
    return asked | {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def lines(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Of its body. Raises IncompleteRead where it breaks off; HTTPResponse's own readline takes that for an end."""
    rest = b""
    while piece := answer.read1(65536):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode().strip() for line in whole)


def tokens(port: int, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of one streamed answer. Raises OSError (SilentlyCut among them) or HTTPException where it breaks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}")
        for line in lines(answer):
            if line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ConnectionError(str(event["error"]))
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if piece:
                yield piece
        raise SilentlyCut("the stream ended without its [DONE]")
    finally:
        connection.close()


class Ours:
    """applianced and gateway as processes."""

    def __init__(self, folder: Path, model: Path, *, spare: bool) -> None:
        self._spare = spare
        settings = {
            "engine.backend": "native",
            "engine.warm_spare": str(spare).lower(),
            "model.path": str(model),
            # As shipped. Kills a few seconds apart are no story of one engine that fails again and again: each is the first one.
            "supervisor.stable_after_s": "1",
            **{f"supervisor.{name}": value for name, value in (("probe_interval_s", "1"), ("probe_timeout_s", "5"))},
            **{f"supervisor.{name}": value for name, value in (("hang_floor_s", "10"), ("hang_ceiling_s", "60"))},
        }
        self.applianced = Applianced(folder, settings=settings)
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "appliance.gateway",
            "--run-dir",
            str(self.applianced.run_dir),
            "--set",
            f"gateway.port={self.port}",
        ]
        self._gateway = subprocess.Popen(
            [*command, "--state-dir", str(self.applianced.state_dir)], cwd=ROOT, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )

    def ready(self) -> dict[str, Any]:
        """Serving for over a second, the spare ready where there is to be one."""

        def is_ready() -> dict[str, Any] | None:
            status = self.applianced.status()
            serving = status and status["state"] == "serving" and status["state_for_s"] > 1.2
            spare = status and (not self._spare or status["sensors"]["warm_spare"]["detail"].startswith("ready"))
            return status if serving and spare else None

        found: dict[str, Any] = wait_for(is_ready, "serving, with its spare", START_S)
        return found

    def memory(self) -> str:
        """Of engine and spare together."""
        engine = memory_of(self.ready()["engine_pid"])
        spares = [pid.pid for pid in psutil.Process(self.applianced.process.pid).children() if "--spare" in pid.cmdline()]
        others = [memory_of(pid) for pid in spares if pid != self.ready()["engine_pid"]]
        mib = [round(sum(one[part] for one in (engine, *others)) / 1024**2) for part in (0, 1)]
        return f"engine{' and spare' if others else ''}: {mib[0]} MiB of their own, {mib[1]} MiB with the mapped weights (PSS)"

    def stop(self) -> None:
        """Both."""
        self._gateway.terminate()
        self._gateway.wait(30)
        self.applianced.stop(timeout_s=60)


def kill_under_stream(ours: Ours, body: dict[str, Any], right: str, after: int, result: Result) -> None:
    """One kill; the next token, the phases, and whether the answer is the right one."""
    status = ours.ready()
    text, killed_s, killed_at, told_s = "", 0.0, 0.0, 0.0
    for count, piece in enumerate(tokens(ours.port, body), 1):
        # What the dead engine had sent already is here within milliseconds; no other life can be.
        if killed_s and not told_s and time.monotonic() - killed_s > 0.05:
            told_s = time.monotonic() - killed_s
        text += piece
        if count == after:
            os.kill(status["engine_pid"], signal.SIGKILL)
            killed_s, killed_at = time.monotonic(), time.time()
    if not told_s:
        raise SystemExit("the answer ended before its engine was killed: raise ANSWER_TOKENS")
    result.next_token_s.append(told_s)
    if text != right:
        result.goes_on = "WRONG TEXT"
        result.notes.append(f"was {right!r}\n  is {text!r}")
    for name, ms in phases(ours.applianced.log, killed_at).items():
        result.phases_ms.setdefault(name, []).append(ms)


def phases(log: Path, killed_at: float) -> dict[str, float]:
    """Milliseconds from the kill to the first line of each kind after it."""
    found: dict[str, float] = {}
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError):
            said = json.loads(line)
            at = datetime.fromisoformat(said["timestamp"]).timestamp()
            for word, name in PHASES:
                has = word in said if word == "cause" else said["event"].startswith(word) or f" INFO {word}" in said["event"]
                if has and at >= killed_at and name not in found:
                    found[name] = 1000 * (at - killed_at)
    return found


def measure_ours(name: str, model: Path, kills: int, *, spare: bool) -> Result:
    """One row, with all that can be said of it."""
    result, draw = Result(name, goes_on="yes, the same text"), random.Random(7)
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        ours = Ours(Path(folder), model, spare=spare)
        try:
            ours.ready()
            right = {number: "".join(tokens(ours.port, question(number))) for number in range(4)}
            result.notes.append(ours.memory())
            for number in range(kills):
                kill_under_stream(ours, question(number % 4), right[number % 4], draw.randint(*BEFORE_KILL), result)
                print(f"  {name}, kill {number + 1}: {result.next_token_s[-1]:.3f} s", file=sys.stderr, flush=True)
        finally:
            ours.stop()
    return result


def measure_other(name: str, port: int, kills: int, under: contextlib.AbstractContextManager[Servers]) -> Result:
    """A server that is restarted by somebody, and a client that asks again."""
    result, draw = Result(name), random.Random(7)
    with under as servers:
        first_token(port, time.monotonic() + START_S)
        for number in range(kills):
            stream = tokens(port, named(number % 4))
            for _ in itertools.islice(stream, draw.randint(*BEFORE_KILL)):  # its answer may be shorter than ours
                pass
            os.kill(wait_for(servers, "the server", START_S)[0].pid, signal.SIGKILL)
            killed_s = time.monotonic()
            result.ends[end_of(stream)] += 1
            first_token(port, killed_s + START_S)
            result.next_token_s.append(time.monotonic() - killed_s)
            time.sleep(2.0)  # supervisord takes a program that lived less than a second for one that cannot start
            print(f"  {name}, kill {number + 1}: {result.next_token_s[-1]:.3f} s", file=sys.stderr, flush=True)
    return result


def named(number: int) -> dict[str, Any]:
    """The question with the model's name, by which llama-swap chooses."""
    return question(number) | {"model": _peers.MODEL}


def end_of(stream: Iterator[str]) -> str:
    """How it ends."""
    try:
        for _ in stream:
            pass
    except SilentlyCut:
        return "cut without a word"
    except (OSError, http.client.HTTPException):
        return "broken"
    return "whole"


def first_token(port: int, until_s: float) -> None:
    """Ask, again and again."""
    while True:
        try:
            next(tokens(port, named(0)))
            return
        except (OSError, http.client.HTTPException, StopIteration):
            if time.monotonic() > until_s:
                raise
            time.sleep(RETRY_S)


def servers(options: argparse.Namespace, missing: list[str]) -> dict[str, Command]:
    """Every server that is there."""
    engine = [sys.executable, "-m", "appliance.engine", "--model", str(options.model), "--name", _peers.MODEL]
    found: dict[str, Command] = {"our bare engine": lambda port: [*engine, "--port", str(port)]}
    if options.llama_server and options.gguf:
        llama = [*shlex.split(options.llama_server), "-m", options.gguf, "-t", str(len(os.sched_getaffinity(0))), "-c", "2048"]
        found["llama.cpp's server"] = lambda port: [*llama, "--port", str(port)]
    else:
        missing.append("llama.cpp's server: give --llama-server (tests/bench/_llama_server.py says from where) and --gguf")
    return found


def others(options: argparse.Namespace, missing: list[str]) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Every server under every keeper: the row's name, and how it is measured."""
    pairs = itertools.product(servers(options, missing).items(), keepers(options.supervisord, options.llama_swap, missing).items())
    for (server, command), (under, keeper) in pairs:
        yield f"{server} under {under}", partial(_measured, f"{server} under {under}", command, keeper, options.others)


def _measured(name: str, command: Command, keeper: Keeper, kills: int) -> Result:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        return measure_other(name, port, kills, keeper(command, port, Path(folder)))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50, help="of ours with the spare [default: %(default)s]")
    parser.add_argument("--others", type=int, default=10, help="of everything else [default: %(default)s]")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--supervisord", default=shutil.which("supervisord"))
    parser.add_argument("--llama-swap", default=shutil.which("llama-swap"))
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--gguf", help="the model for llama-server")
    parser.add_argument("--only", default="", help="measure the rows with this in their names [default: all]")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Exit code 1 when the goal is missed or an answer was wrong."""
    options, missing = arguments(), list[str]()
    began = os.getloadavg()
    rows: list[tuple[str, Callable[[], Result]]] = [
        (SPARE, lambda: measure_ours(SPARE, options.model, options.kills, spare=True)),
        ("ours, without", lambda: measure_ours("ours, without", options.model, options.others, spare=False)),
        *others(options, missing),
    ]
    results = [measure() for name, measure in rows if options.only in name]
    if options.json:
        print(json.dumps({result.name: {"next_token_s": result.next_token_s, "phases_ms": result.phases_ms} for result in results}))
    else:
        print(f"\nfrom kill -9 to the next token; load of the machine {began[0]:.1f} at the beginning, {os.getloadavg()[0]:.1f} at the end")
        print(f"{'':44}{'median':>11}{'worst':>11}{'kills':>7}   the stream goes on")
        for result in results:
            print(result.row())
        for result in results:
            if result.phases_ms:
                print(f"\n{result.name}: milliseconds after the kill, median (worst)")
                for name, values in result.phases_ms.items():
                    print(f"  {name:28}{statistics.median(values):8.0f} ({max(values):.0f})")
            for note in result.notes:
                print(f"  {note}")
        print("\nnot had here:", "; ".join(missing))
    spare = [result.next_token_s for result in results if result.name == SPARE]
    met = all(statistics.median(times) < GOAL_MEDIAN_S and max(times) < GOAL_WORST_S for times in spare)
    verdict = ("met" if met else "MISSED") if spare else "not looked at"
    print(f"the goal (median under {GOAL_MEDIAN_S:g} s, worst under {GOAL_WORST_S:g} s) is {verdict}", file=sys.stderr)
    return 0 if met and not any(result.goes_on == "WRONG TEXT" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
