"""What systemd hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from appliance.supervisor.notify import NullNotifier, SystemdNotifier, notifier_from


def heard(listener: socket.socket) -> list[str]:
    """Everything that is waiting."""
    messages = []
    listener.setblocking(False)
    while True:
        try:
            messages.append(listener.recv(4096).decode())
        except BlockingIOError:
            return messages


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    """systemd's end."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    return sock


def test_the_words(tmp_path: Path, listener: socket.socket) -> None:
    """Each duty is the word that systemd knows, and a status is one line."""
    notifier = SystemdNotifier(str(tmp_path / "notify"), watchdog_s=None)
    notifier.ready()
    notifier.status("serving\nwell")
    notifier.reloading()
    notifier.stopping()
    notifier.extend()
    messages = heard(listener)
    assert messages[:2] == ["READY=1", "STATUS=serving well"]
    assert messages[2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert messages[3:] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=30000000"]


def test_the_watchdog_is_fed_by_turns_only(tmp_path: Path, listener: socket.socket) -> None:
    """One message for many quick turns, none without a turn, and none at all where no watchdog is armed."""
    notifier = SystemdNotifier(str(tmp_path / "notify"), watchdog_s=30.0)
    assert heard(listener) == []
    for _ in range(100):
        notifier.turn_done()
    assert heard(listener) == ["WATCHDOG=1"]
    SystemdNotifier(str(tmp_path / "notify"), watchdog_s=None).turn_done()
    assert heard(listener) == []


def test_nobody_at_the_other_end_is_no_error(tmp_path: Path) -> None:
    """systemd restarting may not end us."""
    SystemdNotifier(str(tmp_path / "gone"), watchdog_s=1.0).ready()


def test_an_abstract_address(tmp_path: Path) -> None:
    """A leading @ means the abstract namespace."""
    name = f"appliance-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        SystemdNotifier(f"@{name}", None).ready()
        assert heard(listener) == ["READY=1"]


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000"}, 15.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, None),
        ({"NOTIFY_SOCKET": "/x"}, None),
        ({}, None),
    ],
)
def test_the_environment_decides(environment: dict[str, str], interval_s: float | None) -> None:
    """A watchdog meant for another process is not ours to feed; without a socket there is nobody to tell."""
    notifier = notifier_from(environment)
    assert notifier.watchdog_interval_s == interval_s
    assert isinstance(notifier, NullNotifier) is (not environment)
