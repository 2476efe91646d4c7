"""A real spare with the demo model, told over its channel as applianced tells it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.listen import _answers

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}
WARM_S = 120.0


class Spare:
    """`python -m appliance.engine --spare`, and applianced's end of its channel."""

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        self.log = log
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(WARM_S)
        command = [sys.executable, "-m", "appliance.engine", "--spare", "--model", str(model), "--threads", "2", *more]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stderr=stderr)
        theirs.close()

    def tell(self, message: bytes) -> bytes:
        self.channel.send(message)
        return self.channel.recv(4096)

    def sockets(self) -> int:
        """How many of its descriptors are sockets."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return sum(str(entry.readlink()).startswith("socket:") for entry in folder.iterdir())

    def anonymous_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.fixture
def spare(demo_model: Path, tmp_path: Path) -> Iterator[Spare]:
    one = Spare(demo_model, tmp_path / "log")
    yield one
    one.process.kill()
    one.process.wait()
    one.channel.close()


INT8 = ("--weights-dtype", "int8")
PACK = "import sys, pathlib; from appliance.engine.build import load_decoder; load_decoder(pathlib.Path(sys.argv[1]), weights_dtype='int8')"


@pytest.fixture
def spare_int8(demo_model: Path, tmp_path: Path) -> Iterator[Spare]:
    """As the appliance has it: with 8-bit weights, which an engine before it has packed."""
    subprocess.run([sys.executable, "-c", PACK, str(demo_model)], cwd=ROOT, check=True, timeout=120)
    one = Spare(demo_model, tmp_path / "log", *INT8)
    yield one
    one.process.kill()
    one.process.wait()
    one.channel.close()


def ask(path: Path, body: Any) -> Any:
    """One answer over a unix socket."""
    connection = http.client.HTTPConnection("engine", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(str(path))
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    return json.loads(connection.getresponse().read())


def until_ready(path: Path, log: Path) -> None:
    """Its log says so."""
    from tests.integration.conftest import wait_until

    wait_until(lambda: "The engine is ready." in log.read_text() and _answers(path), f"ready: {log}")


def command(model: Path, path: Path, *more: str) -> list[str]:
    told = ["--model", str(model), "--name", "demo", "--socket", str(path), "--threads", "2", *more]
    return [sys.executable, "-m", "appliance.engine", *told]


def test_it_becomes_the_engine_it_is_told_to_be_and_answers_as_a_cold_one(spare_int8: Spare, demo_model: Path, tmp_path: Path) -> None:
    """Before: one socket (its channel), no KV pool, an answer to each ping. After: other settings than any default, the text of a
    cold engine, and every thread that computes at ordinary priority."""
    spare = spare_int8
    assert spare.tell(b"ping") == b"pong", "while it loads, too"
    assert spare.channel.recv(100) == b"warm mapped"
    assert spare.tell(b"ping") == b"pong"
    assert spare.sockets() == 1
    assert spare.anonymous_bytes() < 350 * 1024**2
    warm = tmp_path / "warm.sock"
    told = command(demo_model, warm, *INT8, "--max-running", "3", "--context-length", "777", "--kv-pool-bytes", str(64 * 1024**2))
    assert spare.tell(json.dumps(told).encode()) == b"taken"
    assert spare.channel.recv(100) == b"", "the channel is closed"
    until_ready(warm, spare.log)
    assert "context_length_tokens=777 max_running=3" in spare.log.read_text()
    answer = ask(warm, QUESTION)
    cold = tmp_path / "cold.sock"
    with (tmp_path / "cold.log").open("w") as stderr:
        engine = subprocess.Popen(command(demo_model, cold, *INT8), cwd=ROOT, stderr=stderr)
    try:
        until_ready(cold, tmp_path / "cold.log")
        assert ask(cold, QUESTION)["choices"] == answer["choices"]
    finally:
        engine.kill()
        engine.wait()
    for thread in Path(f"/proc/{spare.process.pid}/task").iterdir():
        used_ns = int((thread / "schedstat").read_text().split()[0])
        assert used_ns < 1e6 or os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER
    spare.process.send_signal(signal.SIGTERM)
    assert spare.process.wait(30) == 0


def test_it_goes_when_applianced_goes(spare: Spare) -> None:
    """Loading or warm: at the end of its channel it exits with 0 and says why."""
    spare.channel.close()
    assert spare.process.wait(30) == 0
    assert "is not needed any more" in spare.log.read_text()


def test_a_folder_that_cannot_be_served_ends_it_as_it_would_end_an_engine(tmp_path: Path) -> None:
    """Exit code 66 and a ModelError, so that whoever reads the log knows."""
    spare = Spare(tmp_path / "nothing", tmp_path / "log")
    assert spare.process.wait(60) == 66
    assert "ModelError:" in spare.log.read_text()
    spare.channel.close()


def test_by_hand_it_says_that_it_is_not_for_people() -> None:
    """Standard input that is no socket: a sentence and the code of a wrong command line."""
    command = [sys.executable, "-m", "appliance.engine", "--spare", "--model", "x"]
    ended = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "--spare is for applianced" in ended.stderr
