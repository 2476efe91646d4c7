"""Other gateways, to be measured beside ours: installed into a folder of their own, started in front of a local upstream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fakes.scripted_appliance import Connection, free_port

START_S = 120.0
MODEL = "m"


@dataclass(frozen=True)
class Peer:
    """One of them.

    Attributes:
        package: what pip installs.
        argv: from the folder of its environment's programs, its own port, the upstream's, and a folder for files.
        ready_path: answers 200 once it works.
    """

    name: str
    package: str
    argv: Callable[[Path, int, int, Path], list[str]]
    ready_path: str


def _sglang_router(programs: Path, port: int, upstream_port: int, _folder: Path) -> list[str]:
    where = ["--worker-urls", f"http://127.0.0.1:{upstream_port}", "--host", "127.0.0.1", "--port", str(port)]
    return [
        str(programs / "python"),
        "-m",
        "sglang_router.launch_router",
        *where,
        "--prometheus-port",
        str(free_port()),
        "--log-level",
        "error",
    ]


def _litellm(programs: Path, port: int, upstream_port: int, folder: Path) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: http://127.0.0.1:{upstream_port}/v1\n      api_key: none\nlitellm_settings:\n  num_retries: 0\n"
    )
    return [str(programs / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]


PEERS = (
    Peer("sglang-router", "sglang-router==0.3.2", _sglang_router, "/health"),
    Peer("litellm", "litellm[proxy]==1.106.12", _litellm, "/health/liveliness"),
)


def installed(peer: Peer, cache: Path) -> Path:
    """The folder with its programs; made on the first call, by pip."""
    environment = cache / peer.package.replace("[", "-").replace("]", "").replace("==", "-")
    if not (environment / ".installed").exists():
        print(f"installing {peer.package} into {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(environment / "bin/python"), "-m", "pip", "install", "-q", peer.package], check=True)
        (environment / ".installed").touch()
    return environment / "bin"


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


@contextlib.asynccontextmanager
async def running(peer: Peer, programs: Path, upstream_port: int, folder: Path) -> AsyncIterator[tuple[int, int]]:
    """Its pid and its port, once it answers."""
    port = free_port()
    # A local measurement needs neither its list of prices from the network nor a key.
    litellm = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    environment = {**os.environ, **litellm, "NO_PROXY": "*", "PYTHONPATH": ""}
    with (folder / f"{peer.name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *peer.argv(programs, port, upstream_port, folder), stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        await _until_ready(port, peer, folder)
        yield process.pid, port
    finally:
        for pid in tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        await process.wait()


async def _until_ready(port: int, peer: Peer, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time() + START_S
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = await Connection(reader, writer).ask("GET", peer.ready_path)
            writer.close()
            if answer.status == 200:
                return
        if loop.time() > due_s:
            raise RuntimeError(f"{peer.name} is not ready after {START_S:g} s:\n{(folder / f'{peer.name}.log').read_text()[-3000:]}")
        await asyncio.sleep(0.05)
