"""Kernel messages, live: /dev/kmsg, or a FIFO or a growing file in its place.

A record of /dev/kmsg is `priority,sequence,microseconds,flags[,more];text`, then ` KEY=VALUE` lines; one read gives one
record, non-printables and newlines come as `\\xNN` (Documentation/ABI/testing/dev-kmsg). EPIPE means that the ring overtook
us: go on reading. A plain line, with or without `[seconds]` in front, is taken as it is: tests and `dmesg` files have those.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.gpu.kernel_journal import Journal
from appliance.gpu.kernel_line import KernelLine

RECORD_BYTES = 8192
READS_A_TURN = 512
READS_AT_START = 1_000_000
"""All of it: what is left over would pass for news."""
FILE_POLL_S = 0.1
TRY_AGAIN_S = 10.0
"""After it could not be opened, or not be read any more: an owner may set kernel.dmesg_restrict, a file may come later."""
KMSG = "/dev/kmsg"
_KMSG_DEVICE = os.makedev(1, 11)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECORD = re.compile(rb"(?P<priority>\d+),(?P<sequence>\d+),(?P<usec>\d+),[^;]*;(?P<text>.*)", re.DOTALL)
_STAMP = re.compile(r"\[\s*(?P<s>\d+\.\d+)\]\s?(?P<text>.*)", re.DOTALL)
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")
_USER_FACILITY = 8
"""A priority from here on was written by a program (printk's own facility is 0): anybody with write access can say anything."""


def parse(raw: bytes, boot_time_s: float, sequence: int, *, replayed: bool) -> KernelLine | None:
    """One record or line; None for what a program wrote, and for nothing.

    Args:
        boot_time_s: the epoch at which the kernel's clock was zero.
        sequence: for lines that bring none.
    """
    record = _RECORD.match(raw)
    if record is None:
        text = raw.decode("utf-8", errors="replace").strip("\r\n")
        stamp = _STAMP.match(text)
        if stamp is not None:
            return KernelLine(stamp["text"], boot_time_s + float(stamp["s"]), sequence, replayed, float(stamp["s"]))
        return KernelLine(text, None, sequence, replayed) if text else None
    if int(record["priority"]) >= _USER_FACILITY:
        return None
    message = record["text"].split(b"\n", 1)[0]  # what follows are KEY=VALUE lines
    message = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), message)
    uptime_s = int(record["usec"]) / 1e6
    return KernelLine(message.decode("utf-8", errors="replace"), boot_time_s + uptime_s, int(record["sequence"]), replayed, uptime_s)


def boot_id() -> str | None:
    """Names this boot."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None


def _is_kmsg(fd: int) -> bool:
    """Whether a descriptor that we were given is the kernel's log."""
    try:
        facts = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == _KMSG_DEVICE


class KernelLog:
    """Owns the descriptor. `start` begins with what the log holds already (replayed), then calls back for each new batch."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._partial = b""
        self._sequence = 0
        self._one_record_a_read = False
        self._listen: Callable[[Sequence[KernelLine]], None] | None = None
        self._poll: asyncio.Task[None] | None = None
        self._journal: Journal | None = None
        self._trying: asyncio.Task[None] | None = None
        self.boot_id = boot_id()
        self.is_of_this_boot = False
        """Whether what is replayed was said in this boot: true of the kernel's own ring, unknown of a file."""
        self.problem: str | None = None

    def start(self, listen: Callable[[Sequence[KernelLine]], None]) -> None:
        """Open and listen. What cannot be opened is a `problem`, not an error."""
        if not self._path:
            self.problem = "diagnosis.kernel_log is empty: kernel messages are not read"
            return
        self._listen = listen
        if self._begin():
            return
        if self._path == KMSG:
            self._begin_journal(listen)
        self._keep_trying()

    def _begin(self) -> bool:
        """Open it and read what it holds. False: it cannot be read, and `problem` says why."""
        try:
            mode = self._open()
        except OSError as error:
            hint = "; run it by its unit, as root, or set kernel.dmesg_restrict = 0" if isinstance(error, PermissionError) else ""
            self.problem = f"{self._path} cannot be read ({error.strerror}){hint}"
            return False
        self.problem, self._partial = None, b""
        self._one_record_a_read = self.is_of_this_boot = stat.S_ISCHR(mode)
        self._read(replayed=True, reads=READS_AT_START)
        if self._fd < 0:
            return False
        if stat.S_ISREG(mode):
            self._poll = asyncio.ensure_future(self._follow_file())
        else:
            asyncio.get_running_loop().add_reader(self._fd, self.drain)
        return True

    def _keep_trying(self) -> None:
        if self._trying is None or self._trying.done():
            self._trying = asyncio.ensure_future(self._try_again())

    async def _try_again(self) -> None:
        """While nothing is heard at all. What is read then was said before: it is remembered, and ends nothing."""
        while True:
            await asyncio.sleep(TRY_AGAIN_S)
            if (self._journal is None or not self._journal.hears) and self._begin():
                return

    def _begin_journal(self, listen: Callable[[Sequence[KernelLine]], None]) -> None:
        """The second best: whoever may not read the kernel's ring may be in the group that reads the journal."""
        reason = self.problem

        def tell(words: str) -> None:
            self.problem = f"{reason}; {words}"

        self._journal = Journal(listen, tell)
        self._journal.start()
        self.is_of_this_boot = True

    def _open(self) -> int:
        """The kind of file it is. Raises OSError."""
        if self._path == KMSG and _is_kmsg(0):
            # Opened by systemd before it gave up root for us (StandardInput=file:): reading on takes no capability.
            self._fd = os.dup(0)
            os.set_blocking(self._fd, False)
            return stat.S_IFCHR
        mode = Path(self._path).stat().st_mode
        # A FIFO is opened for writing too: else every writer that leaves would be an end of file.
        access = os.O_RDWR if stat.S_ISFIFO(mode) else os.O_RDONLY
        self._fd = os.open(self._path, access | os.O_NONBLOCK | os.O_CLOEXEC)
        return mode

    def drain(self) -> None:
        """Read what is there now: a verdict stands on all that the kernel has said."""
        if self._journal is not None:
            self._journal.drain()
        if self._fd >= 0:
            self._read(replayed=False)

    def stop(self) -> None:
        """Give the descriptor back."""
        if self._journal is not None:
            self._journal.stop()
        if self._trying is not None:
            self._trying.cancel()
        self._close()

    def _close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _follow_file(self) -> None:
        while True:
            await asyncio.sleep(FILE_POLL_S)  # a regular file is always readable: there is nothing to wait for
            self.drain()

    def _read(self, *, replayed: bool, reads: int = READS_A_TURN) -> None:
        boot_time_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        lines: list[KernelLine] = []
        for _ in range(reads):
            data = self._read_once()
            if data is None:
                break
            for raw in self._pieces(data):
                self._sequence += 1
                line = parse(raw, boot_time_s, self._sequence, replayed=replayed)
                if line is not None:
                    lines.append(line)
        if lines and self._listen is not None:
            self._listen(lines)

    def _read_once(self) -> bytes | None:
        while True:
            try:
                return os.read(self._fd, RECORD_BYTES) or None
            except BrokenPipeError:
                continue  # the ring was overwritten under us: the next read is the oldest record that is left
            except BlockingIOError:
                return None
            except OSError as error:
                self.problem = f"{self._path} cannot be read any more ({error.strerror})"
                self._close()  # else the loop would be told without end that there is something to read
                self._keep_trying()
                return None

    def _pieces(self, data: bytes) -> list[bytes]:
        if self._one_record_a_read:
            return [data]
        *pieces, self._partial = (self._partial + data).split(b"\n")
        return pieces
