"""One acceptance suite for every engine: start, chat, stream, disconnect, metrics, a kill under a stream, a hang, a failure, a stop.

Of the real vLLM on a CPU also a KV cache for which there is no memory.

The built-in engine and llama.cpp are the real ones; SGLang and vLLM are their doubles (tests/fakes/doubles).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from appliance.control import client as control
from appliance.core.units import GIB
from appliance.supervisor.memory_room import machine_bytes
from tests.integration.conftest import Foreground, wait_until
from tests.integration.engines import KINDS, Engine, real, real_within_bytes, stop_all

pytestmark = [pytest.mark.model, pytest.mark.network, pytest.mark.timeout(3600 if "real" in KINDS else 240)]

Json = dict[str, Any]
JSON = {"content-type": "application/json"}
"""vLLM answers nothing that does not say so."""


class Appliance:
    """One that serves, and clients of it."""

    def __init__(self, engine: Engine, state_dir: Path) -> None:
        self.engine = engine
        self.run = Foreground(state_dir, *engine.arguments)
        try:
            match = self.run.wait_for(r"Serving (\S+) at (http://\S+)/v1 ", engine.patience_s)
        except BaseException:
            self.run.stop()  # nobody else knows of it
            raise
        self.model, self.url = match[1], match[2]

    def ask(self, path: str, body: Json | None = None) -> tuple[int, bytes]:
        """A whole answer."""
        connection = self.connect()
        connection.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None, JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def connect(self) -> http.client.HTTPConnection:
        """To the gateway."""
        where = urlsplit(self.url)
        return http.client.HTTPConnection(where.hostname or "", where.port, timeout=self.engine.patience_s)

    def chat(self, **changes: Any) -> Json:
        """A chat's body."""
        messages = [{"role": "user", "content": "Count from one to forty, in words."}]
        return {"model": self.model, "messages": messages, "max_tokens": 40, "temperature": 0, **changes}

    def stream(self, on_event: Callable[[int], None] = lambda _: None, **changes: Any) -> tuple[str, bool]:
        """The text of a streamed chat, and whether it ended as it should. Raises on an error event."""
        connection = self.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(self.chat(stream=True, **changes)), JSON)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        text, events, done = "", 0, False
        for raw in answer:
            line = raw.decode().rstrip("\n")
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            document = json.loads(line[6:])
            assert "error" not in document, document
            for choice in document["choices"]:
                text += choice["delta"].get("content") or ""
            events += 1
            on_event(events)
        return text, done

    def engine_ask(self, path: str, body: Json) -> None:
        """To the engine itself, past the gateway: a fault."""
        publication = control.ask((self.run.state_dir / "run").resolve() / "control.sock", "status")
        pid = publication["engine_pid"]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "--uds" in words:
            connection: http.client.HTTPConnection = _Unix(words[words.index("--uds") + 1])
        else:
            connection = http.client.HTTPConnection("127.0.0.1", int(words[words.index("--port") + 1]), timeout=10)
        connection.request("POST", path, json.dumps(body))
        connection.getresponse().read()

    def incidents(self) -> list[Json]:
        """Newest first."""
        found: list[Json] = control.ask((self.run.state_dir / "run").resolve() / "control.sock", "incidents", limit=10)["incidents"]
        return found

    def broken_by(self, breaking: Callable[[], None]) -> tuple[tuple[str, bool], Json]:
        """A stream during which the engine breaks: what the client has of it, and the incident."""
        before = len(self.incidents())
        result = self.stream(lambda events: breaking() if events == 8 else None)
        wait_until(lambda: len(self.incidents()) > before, "an incident")
        wait_until(lambda: self.run.status()["state"] in ("serving", "degraded"), "serving again", self.engine.patience_s)
        return result, self.incidents()[0]


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=10)
        self._path = path

    def connect(self) -> None:
        import socket

        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


@pytest.fixture(scope="module", params=KINDS)
def appliance(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Appliance]:
    """One appliance an engine, for all of its tests; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        engine = KINDS[request.param](Path(folder), demo_model)
        running: Appliance | None = None
        try:
            running = Appliance(engine, Path(folder) / "s")
            yield running
        finally:
            if running is not None and running.run.process.poll() is None:
                running.run.process.kill()
                running.run.process.wait(30)


def test_it_chats(appliance: Appliance) -> None:
    """A whole answer with its usage, under the name that clients know."""
    status, body = appliance.ask("/v1/chat/completions", appliance.chat(max_tokens=8))
    answer = json.loads(body)
    assert status == 200, body
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8
    models = json.loads(appliance.ask("/v1/models")[1])
    assert [model["id"] for model in models["data"]] == [appliance.model]


def test_it_streams(appliance: Appliance) -> None:
    """Token by token, to the end; the same text as a whole answer."""
    times: list[float] = []
    began_s = time.monotonic()
    text, done = appliance.stream(lambda _: times.append(time.monotonic()))
    whole = json.loads(appliance.ask("/v1/chat/completions", appliance.chat())[1])["choices"][0]["message"]["content"]
    assert done
    assert text == whole
    assert times[-1] - times[0] > (times[-1] - began_s) / 4, "all at once, at the end"


def test_its_limits_are_those_that_it_says(appliance: Appliance) -> None:
    """What was configured for it, and a KV cache of its own."""
    limits = appliance.run.status()["limits"]
    assert limits["max_running"] == 4
    assert limits["kv_tokens"] >= limits["context_length_tokens"] > 0


def test_its_numbers_are_under_our_names(appliance: Appliance) -> None:
    """Running, waiting and tokens, whatever it calls them."""
    wait_until(lambda: b"appliance_engine_metrics_up 1.0" in appliance.ask("/metrics")[1], "its metrics", 10)
    page = appliance.ask("/metrics")[1].decode()
    for name in ("running_requests", "waiting_requests", "prompt_tokens_total", "generated_tokens_total"):
        assert f"appliance_engine_{name}" in page


def test_a_client_that_leaves_is_let_go(appliance: Appliance) -> None:
    """The engine stops computing for it: nothing runs any more, long before the answer would have ended."""
    connection = appliance.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(appliance.chat(stream=True, max_tokens=1500, ignore_eos=True)), JSON)
    answer = connection.getresponse()
    answer.readline()
    connection.sock.close()  # http.client keeps it open below the answer
    answer.close()
    connection.close()

    def idle() -> bool:
        page = appliance.ask("/metrics")[1].decode()
        return "\nappliance_engine_running_requests 0.0" in page

    wait_until(idle, "the engine idle again", 10)


def test_a_stream_outlives_its_engine(appliance: Appliance) -> None:
    """kill -9 under it: the client sees a pause, and the rest."""
    undisturbed, _ = appliance.stream()
    (text, done), incident = appliance.broken_by(lambda: os.kill(appliance.run.engine_pid, signal.SIGKILL))
    assert done
    assert incident["generation"] < appliance.run.status()["generation"]
    if appliance.engine.exact:
        assert text == undisturbed
    else:
        assert text.startswith(undisturbed[:10])
        assert len(text) > len(undisturbed) // 2


def test_a_hang_is_found_and_ended(appliance: Appliance) -> None:
    """Stopped as a whole, or a step that never ends: the stream goes on with the next life."""

    def hang() -> None:
        if appliance.engine.double:
            appliance.engine_ask("/fault", {"kind": "hang"})
        else:
            stop_all(appliance.run.engine_pid, signal.SIGSTOP)

    undisturbed, _ = appliance.stream()
    (text, done), incident = appliance.broken_by(hang)
    assert done
    assert "progress" in incident["diagnosis"]["sentence"] or "answer" in incident["diagnosis"]["sentence"], incident
    if appliance.engine.exact:
        assert text == undisturbed


def test_an_engine_that_fails_says_why(appliance: Appliance) -> None:
    """Out of memory in a step, an illegal access, a native death: each by its name, a safer rung where that helps, and no stream lost."""
    if not appliance.engine.double:
        pytest.skip("only doubles fail on command")
    undisturbed, _ = appliance.stream()
    for kind, causes in (("oom", ("cuda_oom",)), ("illegal", ("cuda_illegal_access",)), ("segv", ("segfault", "engine", "killed"))):
        rung = appliance.run.status()["rung"]["index"]
        (text, done), incident = appliance.broken_by(lambda kind=kind: appliance.engine_ask("/fault", {"kind": kind}))
        assert incident["diagnosis"]["cause"].startswith(causes), incident
        assert (text, done) == (undisturbed, True), kind
        if kind == "oom":
            assert appliance.run.status()["rung"]["index"] > rung


def test_it_stops_when_it_is_told(appliance: Appliance) -> None:
    """A stream that runs is finished first, whatever the engine does at a stop (SGLang kills itself); no process is left."""
    got: list[tuple[str, bool]] = []
    began = threading.Event()
    reading = threading.Thread(target=lambda: got.append(appliance.stream(lambda _: began.set())))
    reading.start()
    assert began.wait(60)
    assert appliance.run.stop(signal.SIGTERM) == 0
    reading.join(30)
    assert got
    assert got[0][1]


@pytest.mark.skipif(
    "real" not in KINDS or os.environ["APPLIANCE_TEST_ENGINE"] != "vllm" or Path("/dev/nvidiactl").exists(),
    reason="of the real vLLM on a CPU; llama.cpp's is in test_llamacpp.py, and doubles run out of memory on command",
)
def test_out_of_memory_ends_on_a_rung_that_serves(state_dir: Path) -> None:
    """A KV cache for which there is no memory, twice while vLLM starts: that is said by its name, and a rung with half of it serves."""
    machine = machine_bytes()
    assert machine is not None
    fraction = max(0.1, round(5 * GIB / machine, 3))
    pool = fraction * machine - 1.1 * GIB  # the weights and vLLM's worker are within the fraction
    python = real_within_bytes(state_dir, round(2.9 * GIB + 0.75 * pool))  # its worker takes 2.8 GiB of addresses and the pool
    engine = replace(
        real(), settings=(*real().settings, f"engine.python={python}", "engine.environment=[]", f"budget.mem_fraction={fraction}")
    )
    appliance = Appliance(engine, state_dir / "s")
    try:
        status, (last, first) = appliance.run.status(), appliance.incidents()
        assert status["state"] == "degraded"
        assert (status["rung"]["index"], status["rung"]["mem_fraction"] < fraction) == (1, True)
        assert status["limits"]["kv_tokens"] > 0
        for incident in (first, last):
            assert incident["diagnosis"]["cause"] == "host_oom", incident
        assert "KV cache" in last["action"]["basis"], last
        code, body = appliance.ask("/v1/chat/completions", appliance.chat(max_tokens=8))
        assert code == 200, body
        assert appliance.run.stop(signal.SIGTERM) == 0
    finally:
        if appliance.run.process.poll() is None:
            appliance.run.process.kill()
            appliance.run.process.wait(30)
