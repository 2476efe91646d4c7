"""The real engine over weights that a holder keeps, killed again and again: the same text, from the same memory while it is whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.supervisor.harness import Applianced, is_alive, wait_for

pytestmark = pytest.mark.model

START_S = 60.0
SETTINGS = {
    "engine.backend": "native",
    "engine.weight_holder": "true",
    "engine.warm_spare": "false",
    "engine.kv_pool_bytes": "16MiB",
    "supervisor.probe_timeout_s": "5",
    "supervisor.hang_floor_s": "10",
    "supervisor.hang_ceiling_s": "60",
}
ASKED = {"text": "One, two, three,", "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}


class Box:
    """One appliance."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.applianced = Applianced(folder, settings=SETTINGS | {"model.path": str(model)})

    def serving(self, above: int) -> dict[str, Any]:
        """The status once a later life serves."""

        def reached() -> dict[str, Any] | None:
            status = self.applianced.status()
            return status if status and status["state"] == "serving" and status["generation"] > above else None

        status: dict[str, Any] = wait_for(reached, "serving", START_S)
        return status

    def kill_engine(self) -> dict[str, Any]:
        """SIGKILL, and the next life."""
        status = self.applianced.status()
        os.kill(status["engine_pid"], signal.SIGKILL)
        return self.serving(above=status["generation"])

    def text(self) -> str:
        """What it says."""
        said: str = self.applianced.engine("/generate", ASKED, 30.0)["text"]
        return said

    @property
    def holder(self) -> int:
        """Its pid."""
        children = psutil.Process(self.applianced.process.pid).children()
        return next(child.pid for child in children if "appliance.engine.weight_holder" in child.cmdline())

    def mapped_by(self, pid: int) -> set[str]:
        """The inodes of what it has mapped of a holder."""
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "llm-appliance-weights" in line}

    def flip_a_bit(self) -> None:
        """In the middle of what is held."""
        links = [link for link in Path(f"/proc/{self.holder}/fd").iterdir() if "llm-appliance-weights" in str(link.readlink())]
        fd = os.open(links[0], os.O_RDWR)
        at = os.fstat(fd).st_size // 2
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 64]), at)
        os.close(fd)


@pytest.fixture
def box(tmp_path: Path, demo_model: Path) -> Iterator[Box]:
    """Serving; nobody is left behind."""
    one = Box(tmp_path, demo_model)
    try:
        one.serving(above=0)
        yield one
        children = psutil.Process(one.applianced.process.pid).children()
    finally:
        one.applianced.stop(timeout_s=60)
    assert not [child.pid for child in children if is_alive(child.pid)]


def test_the_same_text_from_held_weights_from_damaged_ones_and_without(box: Box) -> None:
    """kill -9: the next life maps the same memory. A flipped bit: it is found before the first request, the weights are loaded from the
    files, the holder is gone, and the log, the status and the incident say so. The life after that holds them anew."""
    holder, right = box.holder, box.text()
    held = box.mapped_by(box.applianced.status()["engine_pid"])
    assert len(held) == 1
    status = box.kill_engine()
    assert (box.holder, box.mapped_by(status["engine_pid"]), box.text()) == (holder, held, right)
    assert box.applianced.log.read_text().count("The held weights are checked.") == 2
    box.flip_a_bit()
    began_s = time.time()
    status = box.kill_engine()
    assert (box.mapped_by(status["engine_pid"]), box.text()) == (set(), right)
    assert "The held weights are refused: 1 of its" in box.applianced.log.read_text()
    wait_for(lambda: not is_alive(holder), "the end of the damaged holder")
    assert "the weight holder exited with code 65" in box.applianced.status()["sensors"]["weight_holder"]["detail"]
    newest = box.applianced.wait_incident(2)[0]
    assert newest["time_s"] >= began_s - 1
    evidence = box.applianced.ask("incident", id=newest["incident_id"])["incident"]["evidence"]
    assert any("memory was refused: " in item["text"] and "are not what was read from the files" in item["text"] for item in evidence)
    status = box.kill_engine()
    assert len(box.mapped_by(status["engine_pid"])) == 1
    assert box.text() == right
