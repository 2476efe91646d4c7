"""The real engine, killed, stopped, restarted and poisoned under real streams: clients notice a pause, and one culprit an error."""

import http.client
import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from appliance.control import client
from tests.fakes.poisoned_engine import POISON
from tests.integration.resume_soak import SETTINGS, Answer, Question, Soak, ask, questions

pytestmark = pytest.mark.model

CLIENTS = 16


def _settings(*more: str) -> list[str]:
    return list(itertools.chain.from_iterable(("--set", setting) for setting in (*SETTINGS, *more)))


@pytest.mark.timeout(600)
def test_sixteen_clients_get_the_undisturbed_answers(foreground, demo_model: Path) -> None:
    """Kills every ten seconds, then hangs: no error, no token lost or doubled; every text and usage, greedy or seeded, the same."""
    run = foreground("--model", str(demo_model), "--port", "0", *_settings())
    model, url = run.wait_until_serving()
    soak = Soak(run, url, questions(model, "mixed", count=24), CLIENTS)
    with soak.clients():
        soak.disturb(signal.SIGKILL, 10.0, 60.0)
        soak.disturb(signal.SIGSTOP, 10.0, 30.0)
    print(soak.found)
    assert soak.found.wrong == []
    assert soak.found.kills >= 5
    assert soak.found.resumed > 0
    assert run.stop() == 0


def _while_it_streams(url: str, question: Question, disturb: Callable[[], None]) -> Answer:
    """Ask, and when some of the answer has come, break something."""
    got: list[Answer] = []
    asking = threading.Thread(target=lambda: got.append(ask(url, question, stream=True)))
    asking.start()
    _until_sending(url)
    disturb()
    asking.join(120)
    assert got, "no answer"
    return got[0]


def _until_sending(url: str) -> None:
    where, due_s = urlsplit(url), time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
        connection.request("GET", "/status")
        inflight = json.loads(connection.getresponse().read())["inflight"]
        connection.close()
        if any(one["sent_bytes"] > 2000 for one in inflight):
            return
        assert time.monotonic() < due_s, "nothing is sent"
        time.sleep(0.01)


def test_a_stream_outlives_a_requested_restart_and_the_supervisor(foreground, demo_model: Path) -> None:
    """A restart that was asked for and does not wait, and applianced killed with its engine: the same answer each time."""
    run = foreground("--model", str(demo_model), "--port", "0", *_settings("gateway.drain_s=0.2", "supervisor.stop_deadline_s=0.2"))
    model, url = run.wait_until_serving()
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    question = Question(0, {"model": model, **body})
    undisturbed = ask(url, question, stream=True)
    control = (run.state_dir / "run").resolve() / "control.sock"
    restarted = _while_it_streams(url, question, lambda: client.ask(control, "restart", reason="a test"))
    assert restarted == undisturbed
    assert restarted.restarts >= 1  # told again every five seconds, which a start on a busy machine takes
    killed = _while_it_streams(url, question, lambda: psutil.Process(run.pid_of("appliance.supervisor")).kill())
    assert killed == undisturbed
    assert killed.restarts >= 1
    assert run.stop() == 0


@pytest.mark.timeout(400)
def test_of_thirty_one_clients_of_a_real_engine_one_sees_an_error(foreground, demo_model: Path) -> None:
    """A prompt that kills the engine among thirty good ones: 500 with the incident for it, then 422; the rest are answered."""
    script = str(Path(__file__).parents[1] / "fakes" / "poisoned_engine.py")
    command = [
        sys.executable,
        script,
        "--model",
        "{model}",
        "--name",
        "demo",
        "--socket",
        "{socket}",
        "--threads",
        "2",
        "--max-running",
        "8",
    ]
    backend = ("engine.backend=custom", f"engine.command={json.dumps(command)}", "model.name=demo")
    # Thirty-one prompts in one batch are no hang, however busy the machine is.
    patient = ("supervisor.hang_floor_s=20", "supervisor.hang_ceiling_s=30")
    run = foreground("--model", str(demo_model), "--port", "0", *_settings(*backend, *patient))
    model, url = run.wait_until_serving()
    good = [Question(one.number, one.body | {"max_tokens": 24}) for one in questions(model, "greedy", count=30)]
    deadly = Question(99, good[0].body | {"messages": [{"role": "user", "content": f"What does {POISON} mean?"}]})
    with ThreadPoolExecutor(31) as pool:
        asked = [(one, pool.submit(ask, url, one, stream=one.number % 3 != 0)) for one in [*good[:12], deadly, *good[12:]]]
        problems = {one.number: future.exception() for one, future in asked}
        answers = {one.number: future.result() for one, future in asked if future.exception() is None}
    assert [number for number, problem in problems.items() if problem is not None] == [deadly.number], problems
    assert "request_quarantined" in str(problems[deadly.number])
    with pytest.raises(RuntimeError, match=r"422.*request_quarantined"):
        ask(url, deadly, stream=False)
    for one in good[::5]:
        assert ask(url, one, stream=True) == answers[one.number]
    incidents = json.loads(run.ctl("incidents", "--json").stdout)["incidents"]
    assert len(incidents) == 3
    assert incidents[0]["incident_id"] in str(problems[deadly.number])
    assert {incident["diagnosis"]["cause"] for incident in incidents} == {"killed_unknown"}
    assert run.stop() == 0
