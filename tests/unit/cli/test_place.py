"""Which appliance a command line means."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import place as place_module
from appliance.cli.place import Place, own_state_dir
from appliance.core.errors import ApplianceError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own appliance, if any, plays no part."""
    monkeypatch.setattr(place_module, "SYSTEM_RUN_DIR", tmp_path / "sys-run")
    monkeypatch.setattr(place_module, "SYSTEM_STATE_DIR", tmp_path / "sys-state")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _listen(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "control.sock"))


def test_named_folders_count_first(tmp_path: Path) -> None:
    """--run-dir before --state-dir before anything that is there."""
    assert Place(run_dir=tmp_path / "r", state_dir=tmp_path / "s").control_socket() == tmp_path / "r/control.sock"
    assert Place(state_dir=tmp_path / "s").control_socket() == tmp_path / "s/run/control.sock"
    assert Place(state_dir=tmp_path / "s").incidents_db() == tmp_path / "s/incidents.db"


def test_the_boxs_own_comes_before_a_users_run(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a user's run is found where no box's own is."""
    monkeypatch.setattr(place_module, "SYSTEM_RUN_DIR", short / "sys")
    monkeypatch.setenv("XDG_STATE_HOME", str(short / "xdg"))
    assert Place().control_socket() == short / "sys/control.sock"
    _listen(short / "xdg/llm-appliance/run")
    assert Place().control_socket() == short / "xdg/llm-appliance/run/control.sock"
    _listen(short / "sys")
    assert Place().control_socket() == short / "sys/control.sock"


def test_incidents_are_found_by_the_same_order(tmp_path: Path) -> None:
    """With applianced down they are read from the file."""
    own, system = tmp_path / "xdg/llm-appliance/incidents.db", tmp_path / "sys-state/incidents.db"
    assert Place().incidents_db() == system
    own.parent.mkdir(parents=True)
    own.touch()
    assert Place().incidents_db() == own
    system.parent.mkdir()
    system.touch()
    assert Place().incidents_db() == system


def test_a_linked_run_folder_is_followed(tmp_path: Path) -> None:
    """Where the state folder's own path is too long for a socket."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state/run").symlink_to(tmp_path / "elsewhere")
    assert Place(state_dir=tmp_path / "state").control_socket() == tmp_path / "elsewhere/control.sock"


def test_no_home_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a made-up uid."""
    monkeypatch.delenv("XDG_STATE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ApplianceError, match="--state-dir"):
        own_state_dir()
