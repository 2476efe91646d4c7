"""The engine's HTTP side over a scripted engine: in this process for tests, or as a program of its own.

python -m tests.fakes.serve_scripted --socket PATH --model FOLDER [--step-s S] [--load-s S] [--context N] [--poison ID] [--poison-length N]
    [--once FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core.launch import Endpoint
from appliance.engine.__main__ import configure_evidence, run_life
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.listen import endpoint_of, listen
from appliance.engine.messages import GenerateRequest
from appliance.engine.server import EngineServer
from appliance.engine.text import ModelText
from tests.fakes.scripted_engine import ScriptedEngine, echo


@dataclass
class Answer:
    """One HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without their names; [DONE] as a string."""
        datas = [part.partition("data: ")[2] for part in self.body.decode().split("\n\n") if part]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


@dataclass
class Served:
    """A running server and its parts."""

    port: int
    server: EngineServer
    engine: ScriptedEngine
    text: ModelText

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path, b"")

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, raw, **headers)

    async def ask(self, method: str, path: str, body: bytes, **headers: str) -> Answer:
        reader, writer = await self.connect()
        try:
            writer.write(request_bytes(method, path, body, **headers))
            return await read_answer(reader)
        finally:
            writer.close()


def request_bytes(method: str, path: str, body: bytes, **headers: str) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1", "host: engine", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer, the connection being closed behind it."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.read()
    if headers.get("transfer-encoding") == "chunked":
        body = unchunk(body)
    return Answer(int(head[0].split()[1]), headers, body)


def unchunk(body: bytes) -> bytes:
    """The payload of a chunked body."""
    payload = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        payload, body = payload + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return payload


@contextlib.asynccontextmanager
async def served(
    engine: ScriptedEngine, folder: Path, *, max_body_bytes: int = 1_000_000, write_timeout_s: float = 60
) -> AsyncIterator[Served]:
    """The server in this event loop, ready."""
    text = ModelText(folder)
    server = EngineServer(Service(max_body_bytes), lambda: LoadedModel(engine, text), write_timeout_s)
    listener = listen(Endpoint(port=0))
    # Accepted connections inherit it: what a client does not read shows in the server soon, not after the kernel's megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    port = endpoint_of(listener).port
    assert port is not None
    running = asyncio.create_task(server.run(listener))
    one = Served(port, server, engine, text)
    async with asyncio.timeout(10):
        while (await one.get("/health")).status != 200:
            pass
    try:
        yield one
    finally:
        server.stop()
        async with asyncio.timeout(20):
            assert await running == 0


def main() -> None:
    """As a process: SIGTERM and its kin are real."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--poison", type=int, default=-1, help="a prompt that begins with this token id ends the process")
    parser.add_argument("--poison-length", type=int, default=-1, help="a prompt of so many tokens ends the process")
    parser.add_argument("--once", type=Path, help="dies of each such prompt only the first time; what it has met is kept here")
    options = parser.parse_args()
    configure_evidence()

    def spared(request: GenerateRequest) -> bool:
        if options.once is None:
            return False
        met = options.once / hashlib.sha256(repr(request.prompt_ids).encode()).hexdigest()
        known = met.exists()
        met.touch()
        return known

    def script(request: GenerateRequest) -> Sequence[int]:
        poisonous = request.prompt_ids[0] == options.poison or len(request.prompt_ids) == options.poison_length
        if poisonous and not spared(request):
            os.kill(os.getpid(), signal.SIGKILL)
        return echo(request)

    def load() -> LoadedModel:
        time.sleep(options.load_s)
        return LoadedModel(ScriptedEngine(script, step_s=options.step_s, context=options.context), ModelText(options.model))

    server = EngineServer(Service(), load, write_timeout_s=60)
    run_life(server.run(listen(Endpoint(socket_path=options.socket))))


if __name__ == "__main__":
    main()
