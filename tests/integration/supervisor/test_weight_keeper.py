"""A real applianced with [engine] weight_holder, over stand-ins for engine and holder (tests/fakes/native.py)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.supervisor.harness import Applianced, is_alive, wait_for
from tests.integration.supervisor.test_spare import Box

HOLDS = {"engine.weight_holder": "true", "engine.warm_spare": "false"}


class HoldingBox(Box):
    """With a holder, and without a spare unless the test wants one."""

    @property
    def sensor(self) -> str:
        found = self.applianced.status()["sensors"].get("weight_holder")
        return found["detail"] if found else ""

    def behave(self, word: str) -> None:
        (self.folder / "holder").write_text(word)

    def wait_held(self) -> int:
        """Its pid, once it holds."""
        wait_for(lambda: self.sensor.startswith("held since"), "the holder")
        return self.started("holder")[-1]

    def anybody_listens(self) -> bool:
        """Where an engine asks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            return asking.connect_ex(str(self.applianced.run_dir / "weights.sock")) == 0


@pytest.fixture
def make(tmp_path: Path, applianced: Callable[..., Applianced]) -> Iterator[Callable[..., HoldingBox]]:
    """Serving; whatever the test did, nobody is left."""
    boxes: list[HoldingBox] = []

    def start(**settings: str) -> HoldingBox:
        boxes.append(HoldingBox(tmp_path, applianced, settings=HOLDS | settings))
        boxes[0].applianced.wait_state("serving")
        return boxes[0]

    yield start
    for box in boxes:
        box.applianced.stop()
        left = [pid for what in ("engine", "spare", "holder") for pid in box.started(what) if is_alive(pid)]
        assert left == [], "somebody was left behind"
        assert not (box.applianced.run_dir / "weights.sock").exists()


def test_one_holder_stays_through_the_lives_of_many_engines(make: Callable[..., HoldingBox]) -> None:
    """Each is told where to ask; the holder goes first when memory runs out, and nobody else may ask it."""
    box = make()
    holder = box.wait_held()
    command = Path(f"/proc/{box.applianced.status()['engine_pid']}/cmdline").read_bytes().decode().split("\0")
    assert command[command.index("--weight-holder") + 1] == str(box.applianced.run_dir / "weights.sock")
    assert (box.applianced.run_dir / "weights.sock").stat().st_mode & 0o777 == 0o600
    assert box.anybody_listens()
    assert Path(f"/proc/{holder}/oom_score_adj").read_text().strip() == "900"
    for _ in range(2):
        box.kill_engine()
    assert box.started("holder") == [holder]
    assert box.sensor.endswith(f"(pid {holder})")


def test_a_holder_that_is_killed_is_replaced_with_the_next_life(make: Callable[..., HoldingBox]) -> None:
    """The engine serves on, the status says so, and no second copy is loaded beside it; the next life gets a new one."""
    box = make()
    holder, engine = box.wait_held(), box.applianced.status()["engine_pid"]
    os.kill(holder, signal.SIGKILL)
    wait_for(lambda: "the weight holder was killed by SIGKILL; the next engine that loads gets a new one" in box.sensor, "its word")
    assert box.applianced.status()["engine_pid"] == engine
    assert not box.anybody_listens()
    assert box.started("holder") == [holder]
    box.kill_engine()
    assert box.wait_held() != holder
    assert box.applianced.ask("incidents", limit=9)["incidents"][0]["diagnosis"]["cause"] == "killed_unknown"


def test_what_an_engine_refuses_is_told_in_the_log_the_status_and_the_incident(make: Callable[..., HoldingBox]) -> None:
    """While the crash before is being recovered from, it is evidence of that crash."""
    box = make()
    box.wait_held()
    box.behave("refused")
    box.kill_engine()
    wait_for(lambda: "exited with code 65: " in box.sensor, "the status")
    log = box.applianced.log.read_text()
    assert "the weight holder exited with code 65: The weights are given up because one bit is another" in log


def test_a_holder_that_always_fails_is_given_up(make: Callable[..., HoldingBox]) -> None:
    """After three in a row; each costs its life nothing but the load. A changed model is another matter."""
    box = make()
    box.wait_held()
    box.behave("dies-loading")
    os.kill(box.started("holder")[0], signal.SIGKILL)
    for count in (1, 2):
        wait_for(lambda: "gets a new one" in box.sensor, "its word")
        box.kill_engine()
        wait_for(lambda n=count: len(box.started("holder")) == n + 1, "another one")
    wait_for(lambda: "engines load by themselves from now on, because 3 in a row have failed" in box.sensor, "its word")
    assert "exited with code 66: ModelError: there is nothing to hold" in box.sensor
    box.kill_engine()
    assert len(box.started("holder")) == 3
    box.behave("")
    (box.model / "model.safetensors").write_text('{"max_position_embeddings": 4096, "another": 1}')
    box.kill_engine()
    box.wait_held()


def test_another_model_is_held_anew_and_a_stop_ends_the_holder(make: Callable[..., HoldingBox]) -> None:
    """Files that changed under the same name; then a spare that has all its weights, beside which nobody loads a second copy."""
    box = make(**{"engine.warm_spare": "true"})
    first = box.wait_held()
    wait_for(lambda: box.applianced.status()["sensors"]["warm_spare"]["detail"].startswith("ready"), "the spare")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: "gets a new one" in box.sensor, "its word")
    box.kill_engine()
    assert box.started("holder") == [first], "the spare took over with what it had mapped"
    (box.model / "config.json").write_text('{"max_position_embeddings": 8192}')
    box.kill_engine()
    second = box.wait_held()
    (box.model / "config.json").write_text('{"max_position_embeddings": 2048}')
    box.kill_engine()
    wait_for(lambda: not is_alive(second), "the end of what held the old files")
    assert box.wait_held() != second


def test_nothing_is_held_while_parked_and_nothing_outlives_applianced(make: Callable[..., HoldingBox]) -> None:
    """Memory that nobody serves from belongs to the owner; after kill -9 of applianced nobody is there either."""
    box = make(**{"supervisor.start_failures_max": "1"})
    holder = box.wait_held()
    box.applianced.process.kill()
    box.applianced.process.wait()
    wait_for(lambda: not is_alive(holder), "the end of the holder")
    box.applianced.start()
    box.applianced.wait_state("serving")
    second = box.wait_held()
    box.python.write_text("#!/bin/sh\nexit 3\n")
    os.kill(box.applianced.status()["engine_pid"], signal.SIGKILL)
    box.applianced.wait_state("parked")
    wait_for(lambda: not is_alive(second), "the end of the second")
    assert box.sensor == ""
