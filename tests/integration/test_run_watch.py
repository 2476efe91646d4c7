"""`appliancectl run` as a keeper of its two processes and its folders, with a small engine of one's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.small_disk import NEEDS_ROOT, fill, small_disk
from tests.integration.conftest import ROOT, Foreground, wait_until

TOKENS = 100
OWN_ENGINE = [sys.executable, str(ROOT / "tests/fakes/engine.py"), "--socket", "{socket}", "--step-s", "0.05"]
SETTINGS = ("--port", "0", "--set", "engine.backend=custom", "--set", f"engine.command={json.dumps(OWN_ENGINE)}")


def test_a_stopped_child_costs_nobody_an_answer(foreground: Callable[..., Foreground]) -> None:
    """SIGSTOP of the gateway and of applianced under a stream: noticed within seconds, said, and the stream is whole."""
    run = foreground(*SETTINGS)
    _, url = run.wait_until_serving()
    pids = {module: run.pid_of(f"appliance.{module}") for module in ("gateway", "supervisor")}
    engine, answers = run.engine_pid, list[str]()
    asking = threading.Thread(target=lambda: answers.append(_stream(url)))
    asking.start()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    for name in ("gateway", "applianced"):
        run.wait_for(rf"{name} was stopped by a signal and has been silent for 1\d\.\d s: letting it go on", 40)
    asking.join(60)
    assert answers == ["".join(f" t{number}" for number in range(TOKENS))]
    assert {module: run.pid_of(f"appliance.{module}") for module in pids} == pids
    assert run.engine_pid == engine
    assert run.stop() == 0


def _stream(url: str) -> str:
    body = {"model": "fake", "prompt": "x", "max_tokens": TOKENS, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_what_is_wrong_with_a_named_file_is_said_before_anything_starts(foreground: Callable[..., Foreground], tmp_path: Path) -> None:
    """No "Serving" by a gateway that cannot start: one sentence with the file and the reason, exit code 1."""
    run = foreground(*SETTINGS, "--set", f"gateway.api_keys_file={tmp_path}/none")
    assert run.process.wait(30) == 1
    run._reader.join(10)
    assert f"gateway.api_keys_file: {tmp_path}/none: cannot be read (No such file or directory)" in run.said
    assert not any(word in run.said for word in ("Serving", "applianced", "Traceback"))


def test_an_engine_that_cannot_be_started_is_said_and_not_called_serving(foreground: Callable[..., Foreground], tmp_path: Path) -> None:
    """PARKED: the reason stands there like the address would, with the command that tries again, which works."""
    engine = [*OWN_ENGINE, "--fail-start", "RuntimeError: not today", "--fail-starts", "1", "--count-in", str(tmp_path)]
    own = ("--set", f"engine.command={json.dumps(engine)}", "--set", "supervisor.start_failures_max=1")
    run = foreground(*SETTINGS[:4], *own)
    said = run.wait_for(r"(?s)\n  Not serving: (parked .*?)\n\n  (\S.*) resume\n")
    assert "1 failed start" in said[1]
    assert f"--state-dir {run.state_dir}" in said[2]
    assert "Serving" not in run.said
    assert run.ctl("resume").returncode == 0
    run.wait_until_serving()
    assert run.stop() == 0


def test_an_option_does_not_hide_a_wrong_setting(foreground: Callable[..., Foreground]) -> None:
    """--port stands over gateway.port, and -1 is wrong all the same."""
    run = foreground(*SETTINGS, "--set", "gateway.port=-1")
    assert run.process.wait(30) == 1
    run._reader.join(10)
    assert "gateway.port = -1: is below the minimum of 0" in run.said


def test_a_run_folder_that_is_in_use_is_refused_by_its_holder(foreground: Callable[..., Foreground], tmp_path: Path) -> None:
    """Two state folders, one run folder: the second does not take the first one's engine for its own."""
    first = foreground(*SETTINGS)
    first.wait_until_serving()
    holder = first.pid_of("appliance.supervisor")
    argv = [sys.executable, "-m", "appliance.cli", "--state-dir", tmp_path / "other", "--run-dir", first.state_dir / "run", "run"]
    second = subprocess.run([*argv, *SETTINGS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"applianced runs already on {first.state_dir}/run (pid {holder})" in second.stderr
    assert "Serving" not in second.stdout
    assert first.stop() == 0


@NEEDS_ROOT
def test_a_full_disk_keeps_nobody_from_being_served(foreground: Callable[..., Foreground], state_dir: Path) -> None:
    """Not a byte of room from the start: served, the sensor tells, and takes it back by itself once there is room."""
    with small_disk(state_dir / "disk", "size=256k") as disk:
        filler = fill(disk)
        run = Foreground(disk, *SETTINGS)
        try:
            run.wait_until_serving()
            wait_until(lambda: not run.status()["sensors"]["incidents"]["ok"], "the sensor tells")
            filler.unlink()
            wait_until(lambda: run.status()["sensors"]["incidents"]["ok"], "and takes it back")
            assert run.stop() == 0
        finally:
            run.process.kill()
    assert "Traceback" not in run.said


@NEEDS_ROOT
def test_a_disk_that_may_not_be_written_is_one_sentence(state_dir: Path) -> None:
    """EROFS in `run`, in `setup --demo` and on a state folder that is a file: what, where, and no traceback."""
    with small_disk(state_dir / "disk", "ro") as disk:
        for place in (disk, disk / "state"):
            for verb in (["run", *SETTINGS], ["setup", "--demo", "--no-config"]):
                argv = [sys.executable, "-m", "appliance.cli", "--state-dir", place, *verb]
                ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
                assert ended.returncode == 1, ended
                assert str(disk) in ended.stderr
                assert "Read-only file system" in ended.stderr
                assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("verb", [["status"], ["incidents"], ["run", *SETTINGS], ["setup", "--demo"]])
def test_a_state_folder_that_is_a_file_is_a_matter_of_usage(verb: list[str], tmp_path: Path) -> None:
    """For every verb alike."""
    (tmp_path / "file").touch()
    argv = [sys.executable, "-m", "appliance.cli", "--state-dir", tmp_path / "file", *verb]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"'{tmp_path / 'file'}' is a file" in ended.stderr


def test_nothing_is_left_of_a_run_folder_outside_of_the_state_folder(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the state folder's path is too long for a socket, the link and what it points to go with the run."""
    (state_dir / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(state_dir / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    run = Foreground(state_dir / ("deep/" * 20), *SETTINGS)
    run.wait_until_serving()
    assert list((state_dir / "tmp").glob("llm-appliance-*"))
    assert run.stop() == 0
    assert list((state_dir / "tmp").iterdir()) == []
    assert not os.path.lexists(run.state_dir / "run")
