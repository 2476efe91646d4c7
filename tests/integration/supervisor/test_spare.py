"""A real applianced with the native backend; its engine's Python is a script that starts a stand-in (tests/fakes/native.py)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.supervisor.harness import QUICK, ROOT, Applianced, is_alive, wait_for
from tests.integration.supervisor.test_cgroup import delegated  # noqa: F401 - a fixture
from tests.unit.supervisor.test_process import cgroup2_for_tests

BACK_S = 3.0
"""Detection, verdict, half a second for a spare that says nothing, and a cold start of the stand-in, on a busy machine."""


class Box:
    """One applianced over a model folder whose contents nobody reads."""

    def __init__(self, folder: Path, start: Callable[..., Applianced], **options: Any) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (self.model / name).write_text('{"max_position_embeddings": 4096}')
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/fakes/native.py" "{folder}" "$@"\n')
        self.python.chmod(0o755)
        settings = {"engine.backend": "native", "engine.python": str(self.python), "model.path": str(self.model)}
        self.applianced = start(settings=QUICK | settings | options.pop("settings", {}), **options)

    def behave(self, word: str) -> None:
        (self.folder / "spare").write_text(word)

    @property
    def sensor(self) -> str:
        detail: str = self.applianced.status()["sensors"]["warm_spare"]["detail"]
        return detail

    def wait_spare(self, words: str = "ready since") -> int:
        """Its pid, once the sensor says these words."""
        wait_for(lambda: words in self.sensor, f"the spare: {words}")
        return self.started("spare")[-1]

    def started(self, what: str) -> list[int]:
        """The pids of all engines or spares so far, in order."""
        lines = (self.folder / "starts").read_text().splitlines() if (self.folder / "starts").exists() else []
        return [int(line.split()[0]) for line in lines if line.endswith(what)]

    def kill_engine(self) -> dict[str, Any]:
        """SIGKILL; the status once the next life serves, with `took_s`."""
        before, began_s = self.applianced.status(), time.monotonic()
        os.kill(before["engine_pid"], signal.SIGKILL)
        status = self.applianced.wait_state("serving", "degraded", above=before["generation"])
        return status | {"took_s": time.monotonic() - began_s}


@pytest.fixture
def box(tmp_path: Path, applianced: Callable[..., Applianced]) -> Iterator[Box]:
    """Serving."""
    one = Box(tmp_path, applianced)
    one.applianced.wait_state("serving")
    yield one
    one.applianced.stop()
    left = [pid for pid in (*one.started("engine"), *one.started("spare")) if is_alive(pid)]
    assert left == [], "somebody was left behind"


def test_the_spare_takes_over_and_the_next_one_gets_ready(box: Box) -> None:
    """The process that was the spare is the engine, of the next generation; an incident tells the crash; a new spare follows. A planned
    restart on a safer rung takes it too, and tells it that rung's settings."""
    spare = box.wait_spare()
    assert "of its own" in wait_for(lambda: "of its own" in box.sensor and box.sensor, "its memory")
    status = box.kill_engine()
    assert status["engine_pid"] == spare
    assert status["generation"] == 2
    assert box.applianced.wait_incident()[0]["recovered_s"] < BACK_S
    assert "the warm spare took over" in box.applianced.log.read_text()
    oom_score = int(Path(f"/proc/{spare}/oom_score_adj").read_text())
    second = box.wait_spare(f"pid {wait_for(lambda: box.started('spare')[1:], 'a second spare')[0]}")
    assert second != spare
    assert int(Path(f"/proc/{second}/oom_score_adj").read_text()) > oom_score, "the spare goes first when memory runs out"
    box.wait_spare()
    box.applianced.ask("restart", reason="test", rung=2)
    safer = box.applianced.wait_state("degraded", above=2)
    assert safer["engine_pid"] == second
    assert safer["limits"]["max_running"] == safer["rung"]["max_running"] < status["limits"]["max_running"]
    assert len(box.started("engine")) == 1, "no engine was ever started cold but the first"


@pytest.mark.parametrize("word", ["killed", "stopped", "mute", "dies-when-told", "dies-taken", "never-serves"])
def test_a_spare_that_fails_costs_a_cold_start_and_nothing_else(box: Box, word: str) -> None:
    """Whatever is wrong with it, before or while it takes over: served again by a process of its own, one incident, and it is gone."""
    spare = box.wait_spare()
    if word in ("killed", "stopped"):
        os.kill(spare, signal.SIGKILL if word == "killed" else signal.SIGSTOP)
    else:
        box.behave(word)
    status = box.kill_engine()
    assert status["engine_pid"] == box.started("engine")[1] != spare
    assert status["generation"] == 2
    assert status["took_s"] < BACK_S + (5.0 if word == "never-serves" else 0.0)
    assert [incident["diagnosis"]["cause"] for incident in box.applianced.wait_incident()] == ["killed_unknown"]
    assert status["rung"]["index"] == 0
    wait_for(lambda: not is_alive(spare), "the end of the spare")
    assert len(box.started("engine")) == 2


def test_one_that_dies_is_replaced_after_a_while(box: Box) -> None:
    """The sensor says what became of it and when the next one comes; it comes."""
    spare = box.wait_spare()
    os.kill(spare, signal.SIGKILL)
    wait_for(lambda: "was killed by SIGKILL; the next try is in 10 s" in box.sensor, "the sensor's word")
    assert box.applianced.status()["sensors"]["warm_spare"]["ok"] is False
    assert box.applianced.status()["state"] == "serving"
    wait_for(lambda: len(box.started("spare")) == 2, "the next one", 30)
    box.wait_spare()
    assert box.applianced.status()["sensors"]["warm_spare"]["ok"] is True


def test_one_that_cannot_load_says_why_and_is_tried_ever_more_rarely(box: Box, tmp_path: Path) -> None:
    """Its last line is in the status; a crash meanwhile is a cold start."""
    box.wait_spare()
    box.behave("dies-loading")
    box.kill_engine()
    wait_for(lambda: "exited with code 66: ModelError: this folder is not for me; the next try is in 10 s" in box.sensor, "the word")
    assert box.kill_engine()["took_s"] < BACK_S


def test_two_crashes_in_a_row(box: Box) -> None:
    """The second one comes before the next spare is ready: that one is ended, and the start is a cold one."""
    first = box.wait_spare()
    box.behave("never-warm")
    assert box.kill_engine()["engine_pid"] == first
    loading = wait_for(lambda: box.started("spare")[1:], "the next spare")[0]
    wait_for(lambda: f"pid {loading} loads since" in box.sensor, "the sensor")
    status = box.kill_engine()
    assert status["engine_pid"] == box.started("engine")[1]
    wait_for(lambda: not is_alive(loading), "the end of the one that was loading")
    assert "was not warm yet" in box.applianced.log.read_text()


def test_a_model_that_changed_is_not_served_by_what_has_read_the_old_one(box: Box) -> None:
    """Written in place, with the same size and name: the spare is of no use; a fresh one reads the new files."""
    old = box.wait_spare()
    (box.model / "model.safetensors").write_text('{"max_position_embeddings": 4097}')
    status = box.kill_engine()
    assert status["engine_pid"] == box.started("engine")[1]
    wait_for(lambda: not is_alive(old), "the end of the old spare")
    fresh = wait_for(lambda: box.started("spare")[1:], "a fresh spare")[0]
    box.wait_spare()
    assert box.kill_engine()["engine_pid"] == fresh
    third = wait_for(lambda: box.started("spare")[2:], "a third one")[0]
    box.wait_spare()
    (box.model / "config.json").write_text('{"max_position_embeddings": 8192}')
    wait_for(lambda: not is_alive(third) and box.started("spare")[3:], "another one, without a crash", 30)


def test_it_can_be_switched_off_and_on(box: Box) -> None:
    """SIGHUP with engine.warm_spare = false ends it, and a crash is a cold start; true brings one."""
    spare = box.wait_spare()
    (box.folder / "appliance.toml").write_text("[engine]\nwarm_spare = false\n")
    box.applianced.process.send_signal(signal.SIGHUP)
    wait_for(lambda: not is_alive(spare), "the end of the spare")
    wait_for(lambda: box.sensor == "none: engine.warm_spare is false", "the sensor")
    assert box.applianced.status()["sensors"]["warm_spare"]["ok"] is True
    assert box.kill_engine()["engine_pid"] == box.started("engine")[1]
    (box.folder / "appliance.toml").write_text("")
    box.applianced.process.send_signal(signal.SIGHUP)
    assert box.wait_spare() != spare


def test_nobody_survives_applianced(box: Box) -> None:
    """kill -9 of it: engine and spare are gone, without anybody's doing. Started again it serves, with a new spare."""
    spare, engine = box.wait_spare(), box.applianced.status()["engine_pid"]
    box.applianced.process.kill()
    box.applianced.process.wait()
    wait_for(lambda: not is_alive(spare) and not is_alive(engine), "the end of both", 5)
    box.applianced.start()
    box.applianced.wait_state("serving")
    assert box.wait_spare() != spare


def test_stopped_while_a_spare_takes_over(box: Box) -> None:
    """SIGTERM to applianced does not start another engine in the stuck one's place; drain and resume neither."""
    box.wait_spare()
    box.behave("never-serves")
    os.kill(box.applianced.status()["engine_pid"], signal.SIGKILL)
    box.applianced.wait_state("starting", above=1)
    assert box.applianced.stop() == 0
    assert len(box.started("engine")) == 1


def test_parked_there_is_none(box: Box) -> None:
    """Nobody is served, so nothing is kept ready; resume brings engine and spare."""
    spare = box.wait_spare()
    box.applianced.ask("drain", reason="test")
    box.applianced.wait_state("parked")
    wait_for(lambda: not is_alive(spare), "the end of the spare")
    wait_for(lambda: box.sensor == "none while parked", "the sensor")
    box.applianced.ask("resume")
    box.applianced.wait_state("serving", above=1)
    box.wait_spare()


def test_weights_that_have_to_be_copied_are_left_to_the_engine(box: Box) -> None:
    """Such a spare takes over like another; it only may take longer."""
    box.behave("imported")
    box.kill_engine()
    spare = box.wait_spare()
    assert box.kill_engine()["engine_pid"] == spare


@pytest.mark.skipif(cgroup2_for_tests() is None, reason="no writable cgroup v2 mount")
def test_in_a_cgroup(tmp_path: Path, applianced: Callable[..., Applianced], delegated: Path) -> None:  # noqa: F811
    """A spare has a cgroup of its own and keeps it as an engine; the folders of those that are gone are gone."""
    box = Box(tmp_path, applianced, cgroup=delegated)
    box.applianced.wait_state("serving")
    spare = box.wait_spare()
    assert (delegated / "spare-1/cgroup.procs").read_text().split() == [str(spare)]
    assert box.kill_engine()["engine_pid"] == spare
    wait_for(lambda: box.started("spare")[1:], "the next spare")
    box.wait_spare()
    assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["spare-1", "spare-2", "supervisor"]
    assert box.applianced.stop() == 0
    assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["supervisor"]
