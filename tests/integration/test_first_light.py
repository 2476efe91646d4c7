"""The show of the first release: one real model served, killed twenty times under load, diagnosed, and back each time."""

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

pytestmark = pytest.mark.model

CLIENTS = 8
KILLS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGQUIT, signal.SIGABRT, signal.SIGSTOP] * 4
# An abort says that a program gave up, never why: `unknown` is the right answer to kill -ABRT, and its evidence is kept.
CAUSE_OF = {
    signal.SIGKILL: "killed_unknown",
    signal.SIGSEGV: "segfault_native",
    signal.SIGQUIT: "external_sigterm",  # a stop signal that nobody of ours sent
    signal.SIGABRT: "unknown",
    signal.SIGSTOP: "engine_watchdog",
}
SETTINGS = (
    "supervisor.hang_floor_s=2",
    "supervisor.hang_ceiling_s=5",
    "supervisor.probe_interval_s=0.2",
    # Twenty crashes within minutes would rightly end on the last rung, or with a person called: here a second of service
    # is a stable time, so that each kill is the first one.
    "supervisor.stable_after_s=1",
)
STABLE_S = 1.2


class Load:
    """Clients that ask one question after another, without streaming and without any retry of their own."""

    def __init__(self, url: str, model: str) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._model = model
        self._stop = threading.Event()
        self._url = url
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _ask(self, number: int) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                question = [{"role": "user", "content": f"Client {number}, question {turn}: count to ten."}]
                try:
                    answer = client.chat.completions.create(model=self._model, messages=question, max_tokens=24, temperature=0)
                    assert answer.choices[0].message.content
                    self.answers += 1
                except (openai.OpenAIError, AssertionError) as error:
                    self.failures.append(f"client {number}, question {turn}: {error!r} because of {error.__cause__!r}")


def _kills(run, load: Load) -> Iterator[tuple[signal.Signals, float]]:
    def back() -> bool:
        status = run.status()
        return status["generation"] > generation and status["state"] == "serving"

    for number in KILLS:
        answers, stable_s = load.answers, time.monotonic() + STABLE_S
        run.wait_until(lambda n=answers + 3: load.answers >= n or load.failures, "clients are answered")
        run.wait_until(lambda t=stable_s: time.monotonic() >= t, "a stable second")
        generation = run.status()["generation"]
        os.kill(run.engine_pid, number)
        killed_s = time.monotonic()
        run.wait_until(back, f"serving again after {number.name}", 90)
        yield number, time.monotonic() - killed_s


@pytest.mark.timeout(600)
def test_twenty_kills_under_load_fail_no_request_and_each_has_its_cause(foreground, demo_model: Path) -> None:
    """0 failed requests of 8 clients, 20 incidents, every cause right, no engine left behind."""
    run = foreground("--model", str(demo_model), "--port", "0", *itertools.chain.from_iterable(("--set", setting) for setting in SETTINGS))
    model, url = run.wait_until_serving()
    engines = {run.engine_pid}
    with Load(url, model) as load:
        back_s = {}
        for number, took_s in _kills(run, load):
            back_s.setdefault(number.name, []).append(round(took_s, 2))
            engines.add(run.engine_pid)
        answers = load.answers
        run.wait_until(lambda: load.answers > answers or load.failures, "an answer after the last kill")
    assert load.failures == [], run.said
    listed = json.loads(run.ctl("incidents", "--json", "--limit", "100").stdout)["incidents"]
    causes = [incident["diagnosis"]["cause"] for incident in reversed(listed)]
    assert causes == [CAUSE_OF[number] for number in KILLS], Counter(causes)
    assert all(incident["inflight"] for incident in listed), "what was being served is part of an incident"
    assert len(engines) == len(KILLS) + 1
    print(f"answers: {load.answers}; seconds from the signal to serving again: {back_s}")
    assert run.stop() == 0
    assert not any(map(psutil.pid_exists, engines))
