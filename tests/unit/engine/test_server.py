"""One engine life as a process: listening, loading, signals, exit codes. The model is scripted, everything else is real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.launch import Endpoint
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.listen import ListenError, endpoint_of, listen
from appliance.engine.messages import EngineStats
from appliance.engine.report import batch_lines
from appliance.engine.server import EngineServer
from appliance.engine.text import ModelText
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (INFO|WARNING|ERROR) \S.*")


class Life:
    """A process under test and its log."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        self.socket = folder / "engine.sock"
        self.log = folder / "engine.log"
        command = [sys.executable, "-m", module, "--socket", str(self.socket), *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log)

    def ask(self, request: bytes) -> tuple[int, Any]:
        """Status and JSON of one answer; (0, None) while nobody listens."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            try:
                sock.connect(str(self.socket))
            except OSError:
                return 0, None
            sock.sendall(request)
            answer = b""
            while part := sock.recv(65536):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def health(self) -> tuple[int, Any]:
        return self.ask(b"GET /health HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n")

    def until(self, condition: Callable[[], bool], within_s: float = 20) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, f"still not so after {within_s} s; log:\n{self.log.read_text()}"
            time.sleep(0.01)

    def begin(self, body: object) -> socket.socket:
        """A request whose answer is not read yet."""
        raw = json.dumps(body).encode()
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(str(self.socket))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
        return sock


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Starts lives of the scripted engine; whatever still runs at the end is killed."""
    lives: list[Life] = []

    def start(*arguments: str, module: str = "tests.fakes.serve_scripted") -> Life:
        folder = byte_level_folder(tmp_path / "model")
        lives.append(Life(tmp_path, module, "--model", str(folder), *arguments))
        return lives[-1]

    yield start
    for life in lives:
        life.process.kill()
        life.process.wait()


def test_loading_then_ready_then_sigterm(start: Callable[..., Life]) -> None:
    """HTTP answers 503 loading before the model is there, 200 after; SIGTERM ends an idle engine with 0; the log says so."""
    life = start("--load-s", "1")
    life.until(lambda: life.health()[0] != 0)
    assert life.health() == (503, {"status": "loading"})
    status, body = life.ask(b"GET /v1/models HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n")
    assert (status, body["error"]["code"]) == (503, "model_loading")
    life.until(lambda: life.health()[0] == 200)
    assert stat.S_IMODE(life.socket.stat().st_mode) == 0o660
    life.process.send_signal(signal.SIGTERM)
    assert life.process.wait(10) == 0
    log = life.log.read_text()
    for words in ("Listening on unix:", "The engine is ready. model=tiny", "SIGTERM received.", "The engine has stopped."):
        assert words in log
    assert all(LINE.fullmatch(line) for line in log.splitlines()), log


def test_sigterm_lets_running_answers_finish(start: Callable[..., Life]) -> None:
    """The running answer arrives whole, then the process ends with 0."""
    life = start("--step-s", "0.02")
    life.until(lambda: life.health()[0] == 200)
    sock = life.begin({"prompt": "x", "max_tokens": 50, "ignore_eos": True})
    life.until(lambda: life.health()[1]["running"] == 1)
    life.process.send_signal(signal.SIGTERM)
    life.until(lambda: life.health()[1]["status"] == "draining")
    answer = sock.makefile("rb").read()
    assert b'"completion_tokens":50' in answer
    assert life.process.wait(10) == 0
    assert "Gracefully exiting… Remaining number of requests: 1." in life.log.read_text()


def test_second_sigterm_does_not_wait(start: Callable[..., Life]) -> None:
    """Asked twice, it goes at once and says what it leaves."""
    life = start("--step-s", "0.5")
    life.until(lambda: life.health()[0] == 200)
    _sock = life.begin({"prompt": "x", "max_tokens": 200, "ignore_eos": True})
    life.until(lambda: life.health()[1]["running"] == 1)
    life.process.send_signal(signal.SIGTERM)
    life.until(lambda: life.health()[1]["status"] == "draining")
    life.process.send_signal(signal.SIGTERM)
    assert life.process.wait(3) == 0
    assert "with 1 requests unfinished" in life.log.read_text()


def test_sigterm_while_loading_ends_at_once(start: Callable[..., Life]) -> None:
    """Nobody waits for a load that nobody wants any more."""
    life = start("--load-s", "60")
    life.until(lambda: life.health()[0] == 503)
    life.process.send_signal(signal.SIGTERM)
    assert life.process.wait(3) == 0


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGQUIT, "most recent call first"), (signal.SIGSEGV, "Fatal Python error: Segmentation fault")]
)
def test_deadly_signals_print_stacks_and_kill(start: Callable[..., Life], number: signal.Signals, words: str) -> None:
    """SIGQUIT and SIGSEGV end the process by that signal, and leave stacks in the log."""
    life = start()
    life.until(lambda: life.health()[0] == 200)
    life.process.send_signal(number)
    assert life.process.wait(10) == -number
    assert words in life.log.read_text()


def test_bad_model_folder_is_66(start: Callable[..., Life]) -> None:
    """The sentence names the file; the exit code is EX_NOINPUT; torch was not imported for it."""
    life = start("--model", "/nowhere", module="appliance.engine")
    assert life.process.wait(20) == 66
    assert "ERROR ModelError: /nowhere/tokenizer.json cannot be read: there is no such file" in life.log.read_text()


def test_address_in_use_is_1(start: Callable[..., Life]) -> None:
    """A second engine on the same socket says [Errno 98] and leaves the first alone; a dead one's file is replaced."""
    first = start()
    first.until(lambda: first.health()[0] == 200)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in (["--socket", str(first.socket)], ["--port", str(taken.getsockname()[1])]):
            command = [sys.executable, "-m", "appliance.engine", "--model", "/nowhere", *address]
            second = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=20, check=False)
            assert second.returncode == 1
            assert re.search(r"ERROR \[Errno 98\] error while attempting to bind on address \S+: address already in use", second.stderr)
    assert first.health()[0] == 200
    first.process.kill()
    first.process.wait()
    assert first.socket.exists()
    again = start()
    again.until(lambda: again.health()[0] == 200)


async def test_http_that_dies_is_a_defect(tmp_path: Path) -> None:
    """Should uvicorn end by itself, the life ends with an error instead of serving nobody for ever."""
    engine, text = ScriptedEngine(), ModelText(byte_level_folder(tmp_path))
    server = EngineServer(Service(), lambda: LoadedModel(engine, text), write_timeout_s=60)
    server._http.should_exit = True
    with pytest.raises(RuntimeError, match="ended by itself"):
        await server.run(listen(Endpoint(port=0)))


def test_files_that_are_no_sockets_are_kept(tmp_path: Path) -> None:
    """Somebody's file at the socket's path is not ours to delete; a path that is too long is said to be."""
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ListenError, match="address already in use"):
        listen(Endpoint(socket_path=str(path)))
    assert path.read_text() == "data"
    with pytest.raises(ListenError, match="path too long"):
        listen(Endpoint(socket_path="/" + "a" * 200))


def test_port_is_loopback_only() -> None:
    """A port is opened on 127.0.0.1 and nowhere else; 0 lets the kernel choose and the endpoint says which."""
    with listen(Endpoint(port=0)) as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1"
        assert endpoint_of(sock) == Endpoint(port=port)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model"),
        (["--model", "m"], "one of the arguments --socket --port --spare is required"),
        (["--model", "m", "--socket", "s", "--port", "1"], "not allowed with"),
        (["--model", "m", "--port", "70000"], "--port: 70000 is out of range: from 0 to 65535"),
        (["--model", "m", "--port", "0", "--threads", "two"], "--threads: 'two' is no number"),
        (["--model", "m", "--port", "0", "--prefill-fraction", "nan"], "out of range: from 0.05 to 0.95"),
        (["--model", "m", "--port", "0", "--max-running", "0"], "at least 1"),
    ],
)
def test_command_line_mistakes_are_2(arguments: list[str], words: str) -> None:
    """Argument, value and limit, and exit code 2."""
    result = subprocess.run(
        [sys.executable, "-m", "appliance.engine", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == 2
    assert words in result.stderr


def test_http_side_does_not_import_torch() -> None:
    """All of it but the build: /health must not wait for torch."""
    modules = "appliance.engine.__main__, appliance.engine.server, appliance.engine.api.app, appliance.engine.text"
    code = f"import sys, {modules}; sys.exit([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules] or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_batch_lines_say_what_happened() -> None:
    """A line for prefill, one for decode, neither when idle."""
    idle = EngineStats(0, 0, 0, 100, 50, 0, 64, 0, 0.0)
    busy = EngineStats(9, 2, 1, 356, 90, 3, 64, 20, 0.1)
    assert batch_lines(idle, idle, 1.0) == []
    assert batch_lines(idle, busy, 2.0) == [
        "Prefill batch. tokens=256 running=2 waiting=1 kv_blocks=20/64",
        "Decode batch. tokens=40 tokens_per_s=20.0 preemptions=3 running=2 waiting=1 kv_blocks=20/64",
    ]
