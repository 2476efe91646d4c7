"""Real processes and sockets around a gateway under test: its child process, engines, and a scripted applianced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.control.server import ControlServer, Handler, PublicationBoard
from appliance.core.launch import Endpoint, EngineLimits
from appliance.core.publication import Publication
from appliance.core.states import EngineState

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


async def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The condition's first true value; fails with `what` when there is none in time."""
    due_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > due_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        await asyncio.sleep(0.01)
    return value


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ScriptedAppliance:
    """applianced's control socket, published on by the test; and the engine's process, started and killed by it."""

    def __init__(self, run_dir: Path, max_running: int = 8) -> None:
        self.run_dir = run_dir
        self.generation = 0
        self.reports: list[Mapping[str, Any]] = []
        self.verbs: dict[str, Handler] = {}
        """What the control socket answers besides reports, if set before `listen`."""
        self.limits = EngineLimits("fake", 4096, max_running, 4096 * max_running)
        self.incident_id: str | None = None
        self.board = PublicationBoard(self._publication(EngineState.PLANNING, None, "the engine is being planned"))
        self.server: ControlServer | None = None
        self.engine: asyncio.subprocess.Process | None = None

    async def listen(self) -> None:
        """Open the control socket."""
        self.server = ControlServer(self.run_dir / "control.sock", {"report": self._report, **self.verbs}, self.board)
        await self.server.start()

    async def hang_up(self) -> None:
        """Close the control socket, as when applianced is restarted."""
        if self.server is not None:
            await self.server.close()
            self.server = None

    async def start_engine(self, *arguments: str, program: str = "upstream.py", publish: bool = True) -> Path:
        """Start the next engine life, wait until it listens, publish it."""
        self.generation += 1
        path = self.run_dir / f"engine-{self.generation}.sock"
        self.engine = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "tests/fakes" / program),
            "--socket",
            str(path),
            *arguments,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        await eventually(lambda: _accepts(path), f"{path} accepts connections")
        if publish:
            self.serve()
        return path

    def kill_engine(self) -> None:
        """SIGKILL."""
        assert self.engine is not None
        with contextlib.suppress(ProcessLookupError):
            self.engine.kill()

    async def crash(self, *, reason: str = "the engine died of SIGKILL", incident_id: str | None = "inc-1") -> None:
        """Kill the engine and say so, as applianced would."""
        self.kill_engine()
        assert self.engine is not None
        await self.engine.wait()
        self.say(EngineState.BACKOFF, reason, incident_id=incident_id)

    def serve(self, limits: EngineLimits | None = None) -> None:
        """Publish the running engine."""
        self.limits = limits or self.limits
        endpoint = Endpoint(socket_path=str(self.run_dir / f"engine-{self.generation}.sock"))
        self.board.post(self._publication(EngineState.SERVING, endpoint, "serving fake"))

    def say(
        self,
        state: EngineState,
        reason: str,
        *,
        retry_after_s: float | None = 3.0,
        incident_id: str | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Publish anything."""
        self.board.post(Publication(state, self.generation, endpoint, None, reason, retry_after_s, incident_id))

    async def restart_whenever_it_dies(self, *arguments: str, program: str = "upstream.py") -> None:
        """What applianced is for: an incident for each death of the engine, and the next life."""
        while True:
            assert self.engine is not None
            await self.engine.wait()
            self.say(EngineState.BACKOFF, f"generation {self.generation} died", incident_id=f"inc-{self.generation}")
            self.incident_id = f"inc-{self.generation}"
            await self.start_engine(*arguments, program=program)

    async def close(self) -> None:
        """End everything."""
        await self.hang_up()
        if self.engine is not None and self.engine.returncode is None:
            self.kill_engine()
            await self.engine.wait()

    def _publication(self, state: EngineState, endpoint: Endpoint | None, reason: str) -> Publication:
        limits, retry_after_s = (self.limits, None) if endpoint else (None, 3.0)
        return Publication(state, self.generation, endpoint, limits, reason, retry_after_s, self.incident_id)

    async def _report(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.reports.append(arguments)
        return {}


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class GatewayProcess:
    """`python -m appliance.gateway` on a free port of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    async def ask(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, **headers: str) -> Answer:
        """One request over a connection of its own."""
        async with self.connection() as connection:
            return await connection.ask(method, path, body, **headers)

    async def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> Answer:
        """One request to the engine."""
        return await self.ask("POST", path, body)

    async def status(self) -> dict[str, Any]:
        """/status."""
        return dict((await self.ask("GET", "/status")).json())

    async def until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """The first /status that meets the condition."""
        due_s = time.monotonic() + DEADLINE_S
        while not condition(status := await self.status()):
            assert time.monotonic() < due_s, f"{what} not in time: {status}"
            await asyncio.sleep(0.01)
        return status

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A client's connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


class Answer:
    """A whole HTTP answer; `complete` says whether it ended as HTTP says it must."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, complete: bool) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.complete = complete

    def json(self) -> Any:
        """The body's document."""
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The inside of the envelope; fails where there is none."""
        error = self.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error), error
        return dict(error)

    def events(self) -> list[str]:
        """The data of the server-sent events."""
        return [event[6:] for event in self.body.decode().split("\n\n") if event.startswith("data: ")]


class Connection:
    """A client that sees the bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, **headers: str) -> None:
        """Write a request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        lines = [f"{method} {path} HTTP/1.1", "host: test"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if body is not None and "transfer_encoding" not in headers:
            lines.append(f"content-length: {len(data)}")
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)

    async def ask(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, **headers: str) -> Answer:
        """Write a request, read its whole answer."""
        self.send(method, path, body, **headers)
        return await self.answer(bodiless=method == "HEAD")

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)).decode("latin-1")
        lines = text.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        return int(lines[0].split()[1]), headers

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The whole next answer."""
        status, headers = await self.head()
        if bodiless:
            return Answer(status, headers, b"", True)
        body, complete = await asyncio.wait_for(self._body(headers), DEADLINE_S)
        return Answer(status, headers, body, complete)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def _body(self, headers: dict[str, str]) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        try:
            if headers.get("transfer-encoding") == "chunked":
                while part := await self.chunk():
                    parts.append(part)
                return b"".join(parts), True
            return await self.reader.readexactly(int(headers.get("content-length", "0"))), True
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            partial = error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
            return b"".join(parts) + partial, False


@contextlib.asynccontextmanager
async def gateway(
    run_dir: Path, *settings: str, arguments: tuple[str, ...] = (), fds: tuple[int, ...] = ()
) -> AsyncIterator[GatewayProcess]:
    """A gateway process; killed at the end if the test has not stopped it."""
    port = free_port()
    log = run_dir / f"gateway-{port}.log"
    command = [sys.executable, "-m", "appliance.gateway", "--run-dir", str(run_dir), "--state-dir", str(run_dir / "state"), *arguments]
    for setting in (f"gateway.port={port}", *settings):
        command += ["--set", setting]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stderr=output,
            cwd=ROOT,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        )
    running = GatewayProcess(process, port, log)
    try:
        await eventually(lambda: process.returncode is not None or b"listening on" in log.read_bytes(), "the gateway listens")
        assert process.returncode is None, log.read_text()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def appliance(
    run_dir: Path, *settings: str, max_running: int = 8, engine: bool = True, program: str = "upstream.py"
) -> AsyncIterator[tuple[GatewayProcess, ScriptedAppliance]]:
    """A gateway, a scripted applianced, and (unless told otherwise) its first engine."""
    scripted = ScriptedAppliance(run_dir, max_running)
    try:
        await scripted.listen()
        if engine:
            await scripted.start_engine(program=program)
        async with gateway(run_dir, *settings) as running:
            if engine:
                await running.until(lambda status: status["standing"] == "open", "the gateway is open")
            yield running, scripted
    finally:
        await scripted.close()
