"""systemd's notification protocol: READY, STATUS, WATCHDOG, RELOADING, STOPPING, EXTEND_TIMEOUT_USEC.

READY is sent when the state machine runs and the control socket listens, not when the engine serves: loading a model takes
minutes, a park takes for ever, and in both applianced does its duty (the gateway answers 503 with the reason). Units that
want to wait for the model can ask `/health`.

WATCHDOG=1 is sent by `turn_done`, which the loop calls at the end of each completed turn, and by nothing else: a timer or a
thread would keep feeding systemd for a loop that is stuck.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Protocol

EXTEND_USEC = 30_000_000
STATUS_MAX_CHARS = 500


class Notifier(Protocol):
    """What the loop tells the service manager."""

    @property
    def watchdog_interval_s(self) -> float | None:
        """How often turn_done has to be called; None without a watchdog."""

    def ready(self) -> None:
        """The start is over."""

    def status(self, sentence: str) -> None:
        """What `systemctl status` shows."""

    def reloading(self) -> None:
        """A reload began; ready() ends it."""

    def stopping(self) -> None:
        """The stop began."""

    def extend(self) -> None:
        """The stop takes longer: do not lose patience."""

    def turn_done(self) -> None:
        """The loop has completed a turn."""


class NullNotifier:
    """Nobody listens: in the foreground, and in tests."""

    watchdog_interval_s: float | None = None

    def ready(self) -> None:
        """Nothing."""

    def status(self, sentence: str) -> None:
        """Nothing."""

    def reloading(self) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """Nothing."""

    def extend(self) -> None:
        """Nothing."""

    def turn_done(self) -> None:
        """Nothing."""


class SystemdNotifier:
    """Owns the datagram socket. A message that cannot be sent is lost: waiting for systemd would stop the loop."""

    def __init__(self, address: str, watchdog_s: float | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._fed_s = 0.0
        self.watchdog_interval_s = watchdog_s / 2 if watchdog_s is not None else None

    def ready(self) -> None:
        """READY=1."""
        self._send("READY=1")

    def status(self, sentence: str) -> None:
        """STATUS=, one line."""
        self._send("STATUS=" + " ".join(sentence.split())[:STATUS_MAX_CHARS])

    def reloading(self) -> None:
        """RELOADING=1; the time stamp is what newer systemd wants with it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """STOPPING=1."""
        self._send("STOPPING=1")

    def extend(self) -> None:
        """EXTEND_TIMEOUT_USEC=."""
        self._send(f"EXTEND_TIMEOUT_USEC={EXTEND_USEC}")

    def turn_done(self) -> None:
        """WATCHDOG=1, at most four times an interval of systemd's."""
        now_s = time.monotonic()
        if self.watchdog_interval_s is not None and now_s - self._fed_s >= self.watchdog_interval_s / 2:
            self._fed_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(message.encode(), self._address)


def notifier_from(environment: Mapping[str, str]) -> Notifier:
    """By NOTIFY_SOCKET and WATCHDOG_USEC, where they are meant for this process."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return NullNotifier()
    pid, usec = environment.get("WATCHDOG_PID", ""), environment.get("WATCHDOG_USEC", "")
    armed = usec.isdigit() and int(usec) > 0 and pid in ("", str(os.getpid()))
    return SystemdNotifier(address, int(usec) / 1e6 if armed else None)
