"""What keeps a server alive for recovery.py: it runs a command again whenever it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from tests.bench import _llama_swap, _systemd

ROOT = Path(__file__).parents[2]
Servers = Callable[[], list[psutil.Process]]
"""The processes that somebody keeps alive."""
Command = Callable[[int], list[str]]
"""Of a server that listens on the port."""
Keeper = Callable[[Command, int, Path], contextlib.AbstractContextManager[Servers]]
"""Clients come to the port, the folder is its own."""


@contextlib.contextmanager
def shell_loop(command: list[str], folder: Path) -> Iterator[Servers]:
    """`while true; do SERVER; done`."""
    with (folder / "log").open("ab") as log:
        loop = subprocess.Popen(
            ["/bin/sh", "-c", f"while true; do {shlex.join(command)}; done"], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield psutil.Process(loop.pid).children
    finally:
        os.killpg(loop.pid, signal.SIGKILL)
        loop.wait()


@contextlib.contextmanager
def supervisord(command: list[str], folder: Path, program: str) -> Iterator[Servers]:
    """With its own defaults but for autorestart."""
    (folder / "supervisord.conf").write_text(
        f"[supervisord]\nnodaemon=true\nlogfile={folder}/supervisord.log\npidfile={folder}/pid\n"
        f"[program:server]\ncommand={shlex.join(command)}\ndirectory={ROOT}\nautorestart=true\nstdout_logfile={folder}/log\n"
        f"redirect_stderr=true\n"
    )
    parent = subprocess.Popen([program, "-c", str(folder / "supervisord.conf")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(parent.pid).children
    finally:
        parent.terminate()
        parent.wait(60)


def keepers(supervisord_program: str | None, llama_swap_program: str | None, missing: list[str]) -> dict[str, Keeper]:
    """Everything that restarts servers and is there."""
    found: dict[str, Keeper] = {"a shell loop": lambda command, port, folder: shell_loop(command(port), folder)}
    if supervisord_program:
        found["supervisord"] = lambda command, port, folder: supervisord(command(port), folder, supervisord_program)
    else:
        missing.append("supervisord: give --supervisord")
    if llama_swap_program:
        found["llama-swap"] = partial(_llama_swap.running, llama_swap_program)
    else:
        missing.append("llama-swap: give --llama-swap")
    if why := _systemd.missing():
        missing.append(f"systemd Restart=: {why}")
    else:
        found["systemd Restart="] = lambda command, port, _: _systemd.systemd(command(port), ROOT)
    return found
