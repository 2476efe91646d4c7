"""A server under llama-swap, for recovery.py and crash.py: started for a request, and anew for the first one after its death."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.bench import _peers
from tests.fakes.scripted_appliance import free_port

ROOT = Path(__file__).parents[2]
PARALLEL = 64
"""Requests at once, as ours in crash.py; its own default refuses the eleventh."""
STOP_S = 60.0


@contextlib.contextmanager
def running(program: str, command: Callable[[int], list[str]], port: int, folder: Path) -> Iterator[Callable[[], list[psutil.Process]]]:
    """llama-swap on `port`, all else as it comes; yields how to find the server's process. It may need a moment until it answers.

    Args:
        program: its path.
        command: the server's, that listens on the port it is given and answers GET /health with 200 once it serves.
        folder: for its configuration and its log.
    """
    server_port = free_port()
    model = {"cmd": shlex.join(command(server_port)), "proxy": f"http://127.0.0.1:{server_port}", "concurrencyLimit": PARALLEL}
    config = folder / "llama-swap.yaml"
    config.write_text(json.dumps({"models": {_peers.MODEL: model}}))
    with (folder / "llama-swap.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "-config", str(config), "-listen", f"127.0.0.1:{port}"], cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        yield psutil.Process(process.pid).children
    finally:
        family = _peers.tree(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()
