"""Rebooting for a card: only where the owner wants it, twice a day at most, and not while people are on the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.config.schema import SupervisorTable
from appliance.supervisor import reboot as module
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.reboot import Rebooter, logged_in, reboot, why_not

HOUR_S = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IncidentStore]:
    """A real database."""
    made = IncidentStore(tmp_path, 10)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("mode", "ago_h", "allowed"),
    [
        ("never", [], False),
        ("always", [], True),
        ("idle", [1.0], True),
        ("always", [1.0, 23.0], False),
        ("always", [1.0, 25.0], True),
        ("always", [-5000.0, -1.0], False),
    ],
)
def test_twice_a_day_at_most(mode: str, ago_h: list[float], allowed: bool) -> None:
    """A moment that lies ahead is one of a clock that has gone back since, and counts."""
    now_s = 1e9
    objection = why_not(mode, [now_s - hours * HOUR_S for hours in ago_h], now_s)
    assert (objection is None) == allowed
    if mode == "always" and not allowed:
        assert "2 times within 24 h" in str(objection)


async def test_the_attempt_is_on_record_before_the_command_runs(tmp_path: Path, store: IncidentStore) -> None:
    """A machine that goes down at once has counted; the third time in a day nothing is run."""
    command = ("/bin/sh", "-c", f"echo x >> {tmp_path}/reboots")
    for _ in range(3):
        await reboot("always", command, store, "a card is lost", grace_s=0.0)
    assert (tmp_path / "reboots").read_text() == "x\nx\n"
    assert len(store.recall(module.KEY)["times"]) == 2
    assert IncidentStore(tmp_path, 10).recall(module.KEY)["times"][-1] == pytest.approx(time.time(), abs=60)


async def test_it_waits_for_people_to_leave(tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """idle: a session of a user keeps the machine up; one of the login screen, or one that is closing, does not."""
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    (sessions / "1").write_text("UID=1000\nSTATE=active\nCLASS=user\n")
    (sessions / "2").write_text("UID=1000\nSTATE=closing\nCLASS=user\n")
    (sessions / "3").write_text("UID=108\nSTATE=active\nCLASS=greeter\n")
    monkeypatch.setattr(module, "logged_in", lambda: logged_in(sessions))
    monkeypatch.setattr(module, "IDLE_POLL_S", 0.01)
    assert logged_in(sessions) == 1
    rebooting = asyncio.create_task(reboot("idle", ("touch", str(tmp_path / "rebooted")), store, "x", grace_s=0.0))
    await asyncio.sleep(0.2)
    assert not (tmp_path / "rebooted").exists()
    (sessions / "1").unlink()
    await asyncio.wait_for(rebooting, 10)
    assert (tmp_path / "rebooted").exists()


async def test_an_attempt_that_cannot_be_recorded_is_not_made(tmp_path: Path) -> None:
    """A disk that takes nothing forgets each reboot: the machine would go down after every start."""
    (tmp_path / "state").write_text("a file where the folder should be")
    store = IncidentStore(tmp_path / "state", 10)
    await reboot("always", ("touch", str(tmp_path / "rebooted")), store, "a card is lost", grace_s=0.0)
    assert not (tmp_path / "rebooted").exists()
    store.close()


async def test_a_reboot_can_be_called_off(tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody came, cured it and left: the machine stays up. One that is begun takes the place of the one before."""
    monkeypatch.setattr(module.reboot, "__defaults__", (0.0,))
    monkeypatch.setattr(module, "IDLE_POLL_S", 0.01)
    people = [1]
    monkeypatch.setattr(module, "logged_in", lambda: len(people))
    wanted = SupervisorTable(auto_reboot="idle", reboot_command=("/bin/sh", "-c", f"echo x >> {tmp_path}/reboots"))
    reboots = Rebooter(store)
    reboots.begin(wanted, "a card is lost")
    await asyncio.sleep(0.1)
    reboots.obey(wanted)
    assert reboots.asked
    reboots.obey(SupervisorTable())
    people.clear()
    await asyncio.sleep(0.2)
    assert not (tmp_path / "reboots").exists()
    assert not reboots.asked
    people.append(1)
    reboots.begin(wanted, "a card is lost")
    reboots.begin(wanted, "a card is lost")
    people.clear()
    async with asyncio.timeout(10):
        while not (tmp_path / "reboots").exists():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert (tmp_path / "reboots").read_text() == "x\n"


def test_without_logind_nobody_is_logged_in(tmp_path: Path) -> None:
    """A box without systemd."""
    assert logged_in(tmp_path / "none") == 0
