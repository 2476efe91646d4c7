"""Folders of several engines in one run directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.core.errors import ApplianceError
from appliance.supervisor.run_dir import RunDir


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A unix socket's path has 107 bytes, of which pytest's own folders take most."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


def test_each_engine_counts_its_lives_in_a_folder_of_its_own(short_path: Path) -> None:
    """Made where it is missing, kept where it is."""
    whole = RunDir(short_path / "run")
    whole.take()
    first, second = whole.replica(0), whole.replica(1)
    first.note_generation(7)
    assert [folder.generation for folder in (whole, whole.replica(0), second)] == [0, 7, 0]
    (second.path / "engine-3.sock").touch()
    first.remove_engine_sockets()
    assert (second.path / "engine-3.sock").exists()


def test_a_path_that_leaves_no_room_for_a_socket_is_refused(short_path: Path) -> None:
    """Before an engine is started that nobody could reach: both lengths and the cure; so is a folder that cannot be made."""
    folder = short_path / ("x" * 90)
    folder.mkdir()
    with pytest.raises(ApplianceError) as refused:
        RunDir(folder).replica(0)
    for words in ("replica-0", "107", "shorter run directory"):
        assert words in str(refused.value)
    (short_path / "replica-1").touch()
    with pytest.raises(ApplianceError, match="cannot be made"):
        RunDir(short_path).replica(1)
