"""A child of `appliancectl run`: started, read, restarted with a growing wait as systemd would, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.orphans import ends_with_us

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
QUICK_S = 10.0
"""A child that lived for less has failed to start; one that lived longer starts a new count."""
QUICK_FAILURES_MAX = 5
LONGEST_LINE_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_IGNORED_BY_SHELLS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""`appliancectl run &` in a script, or under nohup, would pass "ignore" on to the engine, which then survives kill -QUIT."""


def restart_delay_s(quick_failures: int) -> float:
    """0.2 s, then twice as long each time, at most 5 s."""
    return min(FIRST_DELAY_S * 2.0 ** max(0, quick_failures - 1), LONGEST_DELAY_S)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a life of a child ended, and when the next one begins (None: it is given up)."""

    words: str
    next_start_s: float | None
    refused: bool = False
    """It ended by itself and with an error before it was ready even once: it would do so again."""


class Child:
    """One program and its current life. Times are passed in (monotonic seconds); nothing here waits."""

    def __init__(
        self, name: str, argv: Sequence[str], *, inherited_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._argv = list(argv)
        self._inherited_fds = tuple(inherited_fds)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._quick_failures = 0
        self._pending = b""
        self.output_ended = False
        """It has closed its stdout and stderr: nothing is to be read any more."""
        self.last_words = ""
        """The last line that it wrote."""
        self.ready = False
        """This life has said READY=1."""
        self.woken_s = float("-inf")
        """When this life was stopped and told to go on."""
        self.killed = False
        """This life was ended by us because it was silent."""
        self._was_ready = False
        self._heard_s = 0.0

    @property
    def alive(self) -> bool:
        """A process exists and has not been reaped."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the current life."""
        assert self._process is not None
        return self._process.pid

    @property
    def output_fd(self) -> int:
        """Its stdout and stderr, non-blocking."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, now_s: float) -> None:
        """Begin a life. It gets SIGTERM when we die, and Ctrl-C in the terminal reaches us alone."""
        bind = ends_with_us()

        def prepare() -> None:
            for number in _IGNORED_BY_SHELLS:
                signal.signal(number, signal.SIG_DFL)
            bind()

        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=self._inherited_fds,
            env=self._environment,
            process_group=0,
            preexec_fn=prepare,  # safe: this process has one thread
        )
        os.set_blocking(self.output_fd, False)
        self._started_s = self._heard_s = now_s
        self._pending = b""
        self.output_ended = self.ready = self.killed = False
        self.woken_s = float("-inf")

    def hear(self, message: str, now_s: float) -> None:
        """It has said this of itself, by sd_notify."""
        words = message.splitlines()
        if "READY=1" in words:
            self.ready = self._was_ready = True
        if "READY=1" in words or "WATCHDOG=1" in words:
            self._heard_s = now_s

    def silent_s(self, now_s: float) -> float:
        """For how long it has given no sign of life."""
        return now_s - self._heard_s

    def be_patient(self, now_s: float) -> None:
        """Something was done about its silence: count anew."""
        self._heard_s = now_s

    @property
    def run_state(self) -> str:
        """As /proc has it: T stopped by a signal, t by a debugger; empty where it is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def lines(self) -> Iterator[str]:
        """What it has written since the last call, in whole lines; overlong ones in pieces."""
        while True:
            try:
                piece = os.read(self.output_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                self.output_ended = True
                yield from self._flush()
                return
            *whole, self._pending = (self._pending + piece).split(b"\n")
            for line in whole:
                yield self._noted(line)
            if len(self._pending) > LONGEST_LINE_BYTES:
                yield from self._flush()

    def reap(self, now_s: float) -> Ended:
        """Take note of the end of the current life; call it when the process has ended."""
        assert self._process is not None
        code = self._process.wait()
        words = _exit_words(code)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        if code > 0 and not self._was_ready:
            return Ended(words, None, refused=True)
        lived_s = now_s - self._started_s
        self._quick_failures = self._quick_failures + 1 if lived_s < QUICK_S else 1
        if self._quick_failures > QUICK_FAILURES_MAX:
            return Ended(words, None)
        return Ended(words, now_s + restart_delay_s(self._quick_failures))

    def signal(self, number: signal.Signals) -> None:
        """To the process; SIGKILL goes to its whole group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)

    def _flush(self) -> Iterator[str]:
        if self._pending:
            yield self._noted(self._pending)
            self._pending = b""

    def _noted(self, line: bytes) -> str:
        text = line.decode(errors="backslashreplace")
        self.last_words = text if text.strip() else self.last_words
        return text


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
