"""A server under a real systemd's `Restart=always`, for recovery.py: a booted container that shares this machine's files, read-only.

The container has a network of its own; whoever asks the server enters it, with the thread that asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.system.box import Box, base_image, why_not

CACHE = Path(os.environ.get("APPLIANCE_TEST_CACHE", "/var/cache/llm-appliance-tests"))
CLONE_NEWNET = 0x40000000
UNIT = """
[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart=/usr/sbin/chroot /host /usr/bin/env -C {folder} {command}
Restart=always
"""
"""systemd's own defaults otherwise, 100 ms before the next start; its limit of five starts in ten seconds would end a benchmark."""


def missing() -> str | None:
    """Why no systemd can be booted here; None where one can."""
    return why_not()


@contextlib.contextmanager
def systemd(command: list[str], folder: Path) -> Iterator[Callable[[], list[psutil.Process]]]:
    """The server as a unit of a booted systemd; yields how to find its process. The calling thread is in the box's network meanwhile.

    Args:
        folder: where the command runs.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=CACHE) as scratch:
        box = Box(f"recovery-{os.getpid()}", Path(scratch), (base_image(CACHE),), ["--bind-ro=/:/host"])
        try:
            box.up()
            unit = UNIT.format(folder=folder, command=shlex.join(command))
            box.path("/etc/systemd/system/server.service").write_text(unit)
            with _network_of(box):
                box.do("systemctl", "daemon-reload")
                box.do("systemctl", "start", "server")
                yield lambda: _found(box, command)
        finally:
            box.down()


def _found(box: Box, command: list[str]) -> list[psutil.Process]:
    """The unit's process by its number here; none while systemd waits."""
    leader = box.leader()
    children = psutil.Process(leader).children() if leader is not None else []
    found = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline()[-len(command) + 1 :] == command[1:]:
                found.append(child)
    return found


@contextlib.contextmanager
def _network_of(box: Box) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(space: int) -> None:
        if libc.setns(space, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network of the box")

    with Path("/proc/thread-self/ns/net").open() as ours, Path(f"/proc/{box.leader()}/ns/net").open() as theirs:
        enter(theirs.fileno())
        try:
            yield
        finally:
            enter(ours.fileno())
