"""applianced's shell: what a signal does, whatever goes wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from appliance.config.schema import Config
from appliance.control.server import PublicationBoard
from appliance.core.errors import ConfigError, ModelError
from appliance.supervisor import events as ev
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.machine import publication_of
from appliance.supervisor.notify import NullNotifier
from appliance.supervisor.reload import Change
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.run_note import RunNote, Unclosed
from appliance.supervisor.service import Service
from tests.unit.supervisor.machine_cases import make_state


class Told(NullNotifier):
    """What the service manager hears."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def reloading(self) -> None:
        """RELOADING=1."""
        self.words.append("reloading")

    def ready(self) -> None:
        """READY=1."""
        self.words.append("ready")


class Served:
    """A supervisor whose reload fails with what it is given."""

    def __init__(self, folder: Path, failure: Exception | None) -> None:
        self.run_dir = RunDir(folder)
        self.notifier = Told()
        self.board = PublicationBoard(publication_of(make_state()))
        self.failure = failure

    async def run(self, unclosed: Unclosed | None = None) -> None:
        """Not here."""

    def post(self, event: ev.Event) -> None:
        """Not here."""

    def reload(self, config: Config) -> tuple[Change, ...]:
        """Fails, or finds nothing."""
        if self.failure is not None:
            raise self.failure
        return ()


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (None, "nothing has changed"),
        (ConfigError("an unknown key"), "the old one stays in force"),
        (ModelError("no such model"), "the old one stays in force"),
    ],
)
def test_a_reload_always_ends(tmp_path: Path, failure: Exception | None, words: str) -> None:
    """Whatever is wrong with what was loaded: READY=1 follows, for else systemd takes the unit to be reloading until somebody kills it."""
    store = IncidentStore(tmp_path, 10)
    served = Served(tmp_path, failure)
    with structlog.testing.capture_logs() as said:
        Service(served, {}, RunNote(store, "boot"), Config)._reload()
    assert served.notifier.words == ["reloading", "ready"]
    assert words in said[-1]["event"]
    store.close()


def test_a_reload_ends_by_a_defect_too(tmp_path: Path) -> None:
    """The event loop tells of it with its traceback, as of any callback's; READY=1 has been said before."""
    store = IncidentStore(tmp_path, 10)
    served = Served(tmp_path, RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        Service(served, {}, RunNote(store, "boot"), Config)._reload()
    assert served.notifier.words == ["reloading", "ready"]
    store.close()
