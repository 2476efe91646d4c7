"""What systemd is told, and what it is not told when the loop stands still."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.core.errors import ControlError
from tests.integration.supervisor.harness import ROOT, Applianced, is_alive, wait_for

Start = Callable[..., Applianced]


def test_systemd_is_told(applianced: Start, tmp_path: Path) -> None:
    """READY while the engine still loads, STATUS sentences, WATCHDOG by turns, STOPPING and the extension at the end."""
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(0.2)
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                try:
                    heard.append(listener.recv(8192).decode())
                except TimeoutError:
                    continue

        thread = threading.Thread(target=listen)
        thread.start()
        one = applianced("--ready-after-s", "1", environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"})
        one.wait_state("serving")
        wait_for(lambda: heard.count("WATCHDOG=1") > 3, "the watchdog is fed")
        assert one.stop() == 0
        stop.set()
        thread.join()
    ready = heard.index("READY=1")
    serving = next(index for index, text in enumerate(heard) if text.startswith("STATUS=serving"))
    assert ready < serving
    assert "STOPPING=1" in heard
    assert any(text.startswith("EXTEND_TIMEOUT_USEC=") for text in heard)


def test_a_stopped_supervisor_feeds_no_watchdog(applianced: Start, tmp_path: Path) -> None:
    """SIGSTOP of applianced: not one WATCHDOG=1 until it runs again, so that systemd sees it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        one = applianced(environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"})
        one.wait_state("serving")
        one.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: Path(f"/proc/{one.process.pid}/stat").read_text().split()[2] == "T", "it is stopped")
        _hears_nothing(listener)
        one.process.send_signal(signal.SIGCONT)
        listener.settimeout(5)
        wait_for(lambda: listener.recv(8192) == b"WATCHDOG=1", "it is fed again")


def test_a_handler_that_sleeps_feeds_no_watchdog(applianced: Start, tmp_path: Path) -> None:
    """The process runs and its loop does not: WATCHDOG=1 ends, and what the service manager does then takes the engine along."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000", "PYTHONPATH": str(ROOT)}
        one = applianced(environment=environment, program=(str(ROOT / "tests/fakes/blocked_applianced.py"),))
        engine = one.wait_state("serving")["engine_pid"]
        threading.Thread(target=lambda: _ask_in_vain(one), daemon=True).start()
        wait_for(lambda: _is_silent(listener), "the loop is blocked")
        _hears_nothing(listener)
        assert Path(f"/proc/{one.process.pid}/stat").read_text().split()[2] == "S"
        one.process.send_signal(signal.SIGABRT)
        one.process.wait(20)
        assert "in _sleeps" in one.log.read_text(), "where it stood is in the log"
        wait_for(lambda: not is_alive(engine), "the engine goes with it")


def _hears_nothing(listener: socket.socket) -> None:
    """Once what was said before has been read."""
    listener.setblocking(False)
    while True:
        try:
            listener.recv(8192)
        except BlockingIOError:
            break
    listener.settimeout(0.6)
    with pytest.raises(TimeoutError):
        listener.recv(8192)


def _is_silent(listener: socket.socket) -> bool:
    listener.settimeout(0.5)
    try:
        return not listener.recv(8192)
    except TimeoutError:
        return True


def _ask_in_vain(one: Applianced) -> None:
    with contextlib.suppress(ControlError):
        one.ask("drain", reason="block")
