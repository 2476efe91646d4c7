"""The engine killed (or stopped) again and again under concurrent streams: every answer must be the undisturbed one.

    python tests/integration/resume_soak.py [--minutes 10] [--every-s 10] [--signal KILL|STOP] [--sampling greedy|seeded|mixed]
                                            [--clients 16] [--model DIR] [--engine native|llamacpp]

Real processes: `appliancectl run` with the demo model. Clients ask over HTTP, without any retry of their own; a third of
them do not stream. Compared are text, finish reason, usage, the number of ids and of roles; with llama.cpp, whose answers
depend on what else it computes, all but text and usage.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]
RESTARTING = ": restarting engine"
SETTINGS = (
    # A second of service is a stable time: a box whose engine really dies every ten seconds should call a person instead.
    "supervisor.stable_after_s=1",
    "supervisor.probe_interval_s=0.2",
    "supervisor.hang_floor_s=2",
    "supervisor.hang_ceiling_s=4",
    "admission.queue_timeout_s=600",
)
TOPICS = ("rain", "a river", "bread", "the moon", "chess", "trains", "honey", "glass", "winter", "a lighthouse", "maps", "salt")


class Appliance(Protocol):
    """What the soak needs of `appliancectl run`."""

    def status(self) -> Json: ...


@dataclass(frozen=True)
class Question:
    """One request; `stream` or not makes no difference to its answer."""

    number: int
    body: Json


@dataclass(frozen=True)
class Answer:
    """What must be the same, whatever happened meanwhile; and, not compared, how often the client was told of a restart."""

    text: str
    finish: str
    usage: str
    ids: int
    roles: int
    restarts: int = field(default=0, compare=False)
    longest_silence_s: float = field(default=0.0, compare=False)


def charged(usage: Json) -> str:
    """What an answer costs, and not how much of its prompt happened to be in the prefix cache."""
    return json.dumps({name: value for name, value in usage.items() if name != "prompt_tokens_details"}, sort_keys=True)


@dataclass
class Found:
    """The result of a soak."""

    streams: int = 0
    whole: int = 0
    resumed: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    silences_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        back = f"{statistics.median(self.back_s):.2f} s (max {max(self.back_s):.2f})" if self.back_s else "-"
        silence = f"{max(self.silences_s):.1f} s" if self.silences_s else "-"
        return (
            f"{self.streams} streams and {self.whole} whole answers, {self.kills} engines lost, {self.resumed} streams went over at least"
            f" one; {len(self.wrong)} wrong or failed; serving again after {back}; longest silence of a stream {silence}"
        )


def questions(model: str, sampling: str, count: int = 36) -> list[Question]:
    """Prompts from one line to a page, answers from a few tokens to a hundred."""
    draw = random.Random(5)
    asked = []
    for number in range(count):
        story = " ".join(draw.choice(TOPICS) for _ in range(draw.choice((2, 20, 150))))
        content = f"Question {number}: write about {story}."
        body: Json = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": draw.choice((12, 40, 90))}
        greedy = sampling == "greedy" or (sampling == "mixed" and number % 2 == 0)
        body |= {"temperature": 0} if greedy else {"temperature": 0.9, "top_p": 0.95, "seed": number}
        if number % 4 == 1:
            body["stop"] = [" the", "\n\n"]
        asked.append(Question(number, body))
    return asked


def ask(url: str, question: Question, *, stream: bool) -> Answer:
    """One request on a connection of its own. Raises on anything that is no complete answer."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
    body = question.body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
        return _streamed(answer) if stream else _whole(json.loads(answer.read()))
    finally:
        connection.close()


def _whole(document: Json) -> Answer:
    choice = document["choices"][0]
    return Answer(choice["message"]["content"], choice["finish_reason"], charged(document["usage"]), 1, 1)


def _streamed(answer: http.client.HTTPResponse) -> Answer:
    text, finishes, usages, ids, roles, restarts, done, silence_s = "", [], [], set(), 0, 0, False, 0.0
    heard_s = time.monotonic()
    for raw in answer:
        line = raw.decode().rstrip("\n")
        silence_s, heard_s = max(silence_s, time.monotonic() - heard_s), time.monotonic()
        restarts += line == RESTARTING
        if line.startswith(":") and line not in (RESTARTING, ": waiting"):
            raise RuntimeError(f"a note that is not for clients: {line[:100]}")
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"an error event: {event['error']}")
        ids.add(event["id"])
        usages += [charged(event["usage"])] if event.get("usage") else []
        for choice in event["choices"]:
            roles += "role" in choice["delta"]
            text += choice["delta"].get("content") or ""
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    if not done or len(finishes) != 1 or len(usages) != 1:
        raise RuntimeError(f"[DONE]: {done}, finish reasons: {finishes}, usages: {usages}")
    return Answer(text, finishes[0], usages[0], len(ids), roles, restarts, silence_s)


class Soak:
    """Clients that ask and compare, while somebody else breaks the engine."""

    def __init__(self, run: Appliance, url: str, asked: list[Question], clients: int, *, exact: bool = True) -> None:
        self._run = run
        self._exact = exact
        self._url = url
        self._asked = asked
        self._clients = clients
        self._turns = itertools.count()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.found = Found()
        with ThreadPoolExecutor(clients) as pool:
            self._right = dict(
                zip((question.number for question in asked), pool.map(lambda one: ask(url, one, stream=True), asked), strict=True)
            )

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """They ask until the end of the block, and finish what they have asked."""
        threads = [threading.Thread(target=self._client) for _ in range(self._clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(330)

    def disturb(self, number: signal.Signals, every_s: float, for_s: float) -> None:
        """A signal every `every_s`; where the engine is not back by then, at the next such moment."""
        began_s = hit_s = time.monotonic()
        while True:
            while hit_s <= time.monotonic():
                hit_s += every_s
            if hit_s > began_s + for_s:
                return
            time.sleep(hit_s - time.monotonic())
            generation, pid = self._run.status()["generation"], self._run.status()["engine_pid"]
            assert pid is not None, "the engine was serving"
            os.kill(pid, number)
            while not self._is_back(generation):
                if time.monotonic() > hit_s + 120:
                    raise RuntimeError(f"not back after {number.name}: {self._run.status()}")
                time.sleep(0.05)
            self.found.kills += 1
            self.found.back_s.append(time.monotonic() - hit_s)

    def _is_back(self, generation: int) -> bool:
        status = self._run.status()
        return status["generation"] > generation and status["state"] == "serving"

    def _client(self) -> None:
        while not self._stop.is_set():
            turn = next(self._turns)
            question, stream = self._asked[turn % len(self._asked)], turn % 3 != 0
            try:
                answer = ask(self._url, question, stream=stream)
                right = self._right[question.number]
                problem = "" if self._same(answer, right) else f"\n  was   {right}\n  is    {answer}"
            except (OSError, ValueError, KeyError, RuntimeError, http.client.HTTPException) as error:
                answer, problem = None, f"{error!r}"
            with self._lock:
                self._count(question, stream, answer, problem)

    def _same(self, answer: Answer, right: Answer) -> bool:
        if self._exact:
            return answer == right
        return bool(answer.text) and answer.finish in ("stop", "length") and (answer.ids, answer.roles) == (right.ids, right.roles)

    def _count(self, question: Question, stream: bool, answer: Answer | None, problem: str) -> None:
        found = self.found
        found.streams += stream
        found.whole += not stream
        if answer is not None and stream:
            found.resumed += bool(answer.restarts)
            found.silences_s.append(answer.longest_silence_s)
        if problem:
            found.wrong.append(f"question {question.number}, {'stream' if stream else 'whole'}: {problem}")


def main() -> int:
    """Exit code 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--sampling", choices=("greedy", "seeded", "mixed"), default="greedy")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=("native", "llamacpp"), default="native")
    options = parser.parse_args()
    from tests.integration.conftest import Foreground
    from tests.integration.engines import llamacpp

    exact = options.engine == "native"
    arguments = ["--model", str(options.model), "--port", "0"] if exact else llamacpp().arguments
    arguments += itertools.chain.from_iterable(("--set", setting) for setting in SETTINGS)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = Foreground(Path(folder), *arguments)
        try:
            model, url = run.wait_until_serving()
            began_s = time.monotonic()
            soak = Soak(run, url, questions(model, options.sampling), options.clients, exact=exact)
            print(f"undisturbed: {time.monotonic() - began_s:.0f} s", flush=True)
            with soak.clients():
                soak.disturb(getattr(signal, f"SIG{options.signal}"), options.every_s, options.minutes * 60)
            causes = Counter(
                incident["diagnosis"]["cause"]
                for incident in json.loads(run.ctl("incidents", "--json", "--limit", "500").stdout)["incidents"]
            )
        finally:
            run.stop()
    print(f"{soak.found}\ncauses: {dict(causes)}", *soak.found.wrong[:20], sep="\n")
    return 1 if soak.found.wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
