"""Kernel messages through journald, for those who may not read the kernel's own ring: `journalctl --dmesg --follow`, a child of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from appliance.gpu.kernel_line import KernelLine

COMMAND = ("journalctl", "--dmesg", "--follow", "--boot", "--lines=all", "--output=json", "--no-pager", "--quiet")
READ_BYTES = 65536
READS_A_TURN = 64


class Journal:
    """Owns the child. Its messages come a little later than the kernel says them: the sensor tells that it is the second best."""

    def __init__(
        self, listen: Callable[[Sequence[KernelLine]], None], tell: Callable[[str], None], command: Sequence[str] = COMMAND
    ) -> None:
        """`tell`: what is wrong with it, at best that it is not the real thing."""
        self._listen = listen
        self._tell = tell
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._began_s = 0.0

    @property
    def hears(self) -> bool:
        """Its child has not ended."""
        return self._child is not None

    def start(self) -> None:
        """Begin with what this boot has said already."""
        self._began_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        null = subprocess.DEVNULL
        try:
            self._child = subprocess.Popen(self._command, stdin=null, stdout=subprocess.PIPE, stderr=null, bufsize=0)
        except OSError as error:
            self._tell(f"nor can the journal be read ({self._command[0]}: {error.strerror})")
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._child.stdout.fileno(), self.drain)
        self._tell("kernel messages are read from the journal instead, a little later than they are said")

    def drain(self) -> None:
        """Read what is there now."""
        if self._child is None or self._child.stdout is None:
            return
        lines: list[KernelLine] = []
        for _ in range(READS_A_TURN):
            try:
                data = os.read(self._child.stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.stop()
                self._tell(f"nor can the journal be read: {self._command[0]} has ended")
                break
            *pieces, self._partial = (self._partial + data).split(b"\n")
            lines += [line for piece in pieces if (line := parse_entry(piece, self._began_s)) is not None]
        if lines:
            self._listen(lines)

    def stop(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None and child.stdout is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_reader(child.stdout.fileno())
            child.stdout.close()
            child.kill()
            child.wait()


def parse_entry(raw: bytes, began_s: float) -> KernelLine | None:
    """One line of `journalctl --output=json`; None for what is no message of the kernel.

    Args:
        began_s: on the monotonic clock; what was said before is replayed.
    """
    try:
        entry: dict[str, Any] = json.loads(raw)
        message = entry["MESSAGE"]
        text = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
        uptime_s = int(entry["_SOURCE_MONOTONIC_TIMESTAMP"]) / 1e6
        time_s = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    except (ValueError, KeyError, TypeError):
        return None
    # Anybody with write access to /dev/kmsg can have a message there; printk's own facility is 0.
    if entry.get("_TRANSPORT") != "kernel" or entry.get("SYSLOG_FACILITY", "0") != "0":
        return None
    sequence = int(entry.get("SEQNUM") or 0)
    return KernelLine(text, time_s, sequence, uptime_s < began_s, uptime_s)
