"""State folder, run folder and lock of `appliancectl run`."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli.foreground.folders import (
    LONGEST_SOCKET_NAME,
    check_run_dir,
    lock_state_dir,
    prepare_run_dir,
    prepare_state_dir,
    refuse_shared,
)
from appliance.core.errors import ApplianceError


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a short path, standing for /tmp."""
    folder = Path(os.path.realpath("/tmp")) / f"t{os.getpid()}"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _long(base: Path) -> Path:
    folder = base / ("deep/" * 30)
    folder.mkdir(parents=True)
    return folder


def _bind(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / LONGEST_SOCKET_NAME))


def test_the_run_folder_is_inside_the_state_folder_where_its_path_is_short(base: Path) -> None:
    """And private."""
    run_dir = prepare_run_dir(base)
    assert run_dir == base / "run"
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    _bind(run_dir)


def test_a_long_path_gets_a_short_folder_and_a_link_to_it(base: Path) -> None:
    """A socket with the longest name can be bound there; the same state folder gets the same one again."""
    state = _long(base)
    run_dir = prepare_run_dir(state)
    _bind(run_dir)
    assert (state / "run").resolve() == run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert prepare_run_dir(state) == run_dir


def test_the_users_runtime_folder_is_preferred(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private and cleaned by the system."""
    (base / "xdg").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "xdg"))
    assert prepare_run_dir(_long(base)).parent == base / "xdg"


def test_a_folder_that_others_may_write_is_refused(base: Path) -> None:
    """Somebody could have put it into /tmp before us."""
    state = _long(base)
    prepare_run_dir(state).chmod(0o777)
    with pytest.raises(ApplianceError, match="not private"):
        prepare_run_dir(state)


def test_a_link_that_somebody_planted_is_refused(base: Path) -> None:
    """mkdir follows no link, and neither does the check."""
    state = _long(base)
    run_dir = prepare_run_dir(state)
    run_dir.rmdir()
    (base / "victim").mkdir(mode=0o700)
    run_dir.symlink_to(base / "victim")
    with pytest.raises(ApplianceError, match="not private"):
        prepare_run_dir(state)


def test_a_named_run_folder_that_is_too_long_is_refused_with_both_numbers(base: Path) -> None:
    """--run-dir is taken as it is or not at all."""
    with pytest.raises(ApplianceError, match=r"has \d+ bytes, sockets leave room for 84"):
        check_run_dir(_long(base))
    assert check_run_dir(base / "r").is_dir()


def test_the_second_run_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    """And once the first is gone, by whatever death, the folder is free."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from pathlib import Path; from appliance.cli.foreground.folders import lock_state_dir\n"
            f"held = lock_state_dir(Path({str(tmp_path)!r})); print('held', flush=True); input()",
        ],
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ApplianceError, match=rf"already at work on .* \(pid {holder.pid}\)"):
        lock_state_dir(tmp_path)
    holder.kill()
    holder.communicate(timeout=30)
    lock_state_dir(tmp_path).close()


def test_a_state_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    """A file in the way."""
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ApplianceError, match=r"state folder .*file"):
            prepare_state_dir(wrong)


def test_a_run_folder_that_an_applianced_holds_is_refused(tmp_path: Path) -> None:
    """By applianced's own lock, with its pid; once it is gone the folder is free."""
    refuse_shared(tmp_path)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from pathlib import Path; from appliance.supervisor.run_dir import RunDir\n"
            f"held = RunDir(Path({str(tmp_path)!r})); held.take(); print('held', flush=True); input()",
        ],
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ApplianceError, match=rf"applianced runs already on .* \(pid {holder.pid}\)"):
        refuse_shared(tmp_path)
    holder.kill()
    holder.communicate(timeout=30)
    refuse_shared(tmp_path)
