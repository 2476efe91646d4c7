"""Proof runs with the built-in engine and the demo model: proved once, refused, killed by the kernel's OOM killer, cut short by a stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.units import MIB
from appliance.supervisor.memory_room import DATA, MEMORY
from tests.integration.supervisor.harness import Applianced, is_alive, wait_for

Start = Callable[..., Applianced]
START_S = 90.0
MEMORY_V1 = Path("/sys/fs/cgroup/memory")
KV_TOKEN_BYTES = 2 * 30 * 3 * 64 * 4


class Box:
    """applianced with the real engine, whose interpreter is a script that may limit itself first."""

    def __init__(self, folder: Path, start: Start, model: Path, **settings: str) -> None:
        self.limits = folder / "limits.sh"
        python = folder / "python"
        python.write_text(f'#!/bin/sh\n[ -f "{self.limits}" ] && . "{self.limits}"\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self.settings = {
            "engine.weights_dtype": "float32",  # the limits are made for these
            "engine.backend": "native", "engine.python": str(python), "model.path": str(model), "engine.threads": "1",
            "engine.warm_spare": "false", "engine.kv_pool_bytes": "128MiB", "engine.context_length_tokens": "1024",
            "engine.prefill_chunk_tokens": "1024", "supervisor.hang_floor_s": "60", "supervisor.hang_ceiling_s": "120",
            "supervisor.start_failures_max": "20",
        } | settings  # fmt: skip
        self.start, self.one = start, start(settings=self.settings)

    def again(self, **settings: str) -> None:
        """A new applianced on the same folders."""
        self.one.stop()
        self.one = self.start(settings=self.settings | settings)

    def wait(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The status, once it is so."""
        found: dict[str, Any] = {}

        def looked() -> bool:
            found.clear()
            found.update(self.one.status())
            return bool(found and condition(found))

        try:
            wait_for(looked, what, START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}\n{self.one.log.read_text()[-3000:]}") from None
        return found

    def served(self) -> dict[str, Any]:
        """The status once clients are served."""
        return self.wait(lambda status: status["state"] in ("serving", "degraded"), "it serves")

    @property
    def runs(self) -> int:
        """Proof runs so far."""
        return self.one.log.read_text().count("the proof run is over")


def sizes_of(pid: int) -> dict[str, int]:
    """Of /proc/PID/status."""
    rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


def test_a_rung_is_proved_once_and_what_was_measured_is_kept(applianced: Start, tmp_path: Path, demo_model: Path) -> None:
    """With room for a hundred such prompts clients are not kept waiting: the proof runs in idle time. Neither a crash of the engine nor
    a kill -9 of applianced makes it run again; the next plan stands on what it measured."""
    box = Box(tmp_path, applianced, demo_model, **{"supervisor.canary_s": "0.5"})
    assert "idle time" in box.served()["proof"]["detail"]
    proved = box.wait(lambda status: status["proof"]["proved"], "the proof")
    assert proved["state"] == "serving"
    assert 0 < proved["proof"]["peak_bytes"] < 256 * MIB
    assert MEMORY in proved["proof"]["detail"]
    plan = proved["rung"]["plan"]
    wait_for(lambda: box.one.status()["rung"]["plan"]["activation_peak_bytes"] == proved["proof"]["peak_bytes"], "it is planned by")
    assert 512 * MIB < plan["weight_bytes"] < 540 * MIB
    os.kill(proved["engine_pid"], signal.SIGKILL)
    box.wait(lambda status: status["generation"] == 2 and status["state"] == "serving", "the next life")
    box.one.process.kill()
    box.one.process.wait()
    box.one.start()
    again = box.served()
    assert again["proof"] == proved["proof"]
    assert again["rung"]["plan"]["activation_peak_bytes"] == proved["proof"]["peak_bytes"]
    assert box.runs == 1


def test_a_proof_in_idle_time_gives_way_and_its_next_run_measures_all(applianced: Start, tmp_path: Path, demo_model: Path) -> None:
    """What the engine has kept of the prompt that was cut short, in its prefix cache and in its heap, does not make the next one cheaper:
    no less is taken to have been measured than was planned."""
    settings = {
        "ladder.prove": "idle", "supervisor.canary_s": "0.5", "engine.context_length_tokens": "2048", "engine.threads": "2",
        "engine.kv_pool_bytes": "256MiB", "engine.prefill_chunk_tokens": "512",
    }  # fmt: skip
    box = Box(tmp_path, applianced, demo_model, **settings)
    planned = box.served()["rung"]["plan"]["activation_peak_bytes"]
    given_up = "the proof run was given up"

    def interrupted() -> bool:
        if box.one.engine("/health")["kv_blocks_used"] * 16 >= 1024:  # half of it is read
            box.one.engine("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}, timeout_s=60)
        return given_up in box.one.log.read_text()

    wait_for(interrupted, "the proof gives way", START_S)
    assert box.runs == 0
    proved = box.wait(lambda status: status["proof"]["proved"], "the proof")
    assert planned <= proved["proof"]["peak_bytes"] < 256 * MIB


def test_a_rung_that_leaves_too_little_is_refused_before_clients_come(applianced: Start, tmp_path: Path, demo_model: Path) -> None:
    """A real limit (RLIMIT_DATA) into which the prefill of the configured chunk does not fit: the engine is left for a smaller chunk at
    once, nobody was served on the first rung, and the incident says that nothing crashed."""
    box = Box(tmp_path, applianced, demo_model, **{"ladder.prove": "off"})
    held = sizes_of(box.served()["engine_pid"])["VmData"]
    box.limits.write_text(f"ulimit -d {(held + 40 * MIB) // 1024}\n")
    box.again(**{"ladder.prove": "always"})
    status = box.served()
    assert status["state"] == "degraded"
    assert status["rung"]["index"] > 0
    assert status["proof"]["proved"] is True, status["proof"]
    assert DATA in status["proof"]["detail"]
    first = box.one.ask("incidents", limit=100)["incidents"][-1]
    assert (first["phase"], first["action"]["kind"], first["rung_before"]) == ("start", "restart_safer", 0)
    assert "a prompt of " in str(box.one.log.read_text())
    assert '"before": "proving", "state": "serving"' not in box.one.log.read_text()
    assert status["restarts"] >= 1


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup (v1) that the kernel's OOM killer watches, and that applianced does not see."""
    path = MEMORY_V1 / f"appliance-proof-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        pytest.skip("no writable memory cgroup (v1)")
    yield path
    wait_for(lambda: not (path / "cgroup.procs").read_text(), "its processes are gone")
    path.rmdir()


def test_the_oom_killer_in_the_proof_is_the_rungs_fault(applianced: Start, tmp_path: Path, demo_model: Path, memory_cgroup: Path) -> None:
    """Killed for real under the longest prompt: no second try on the same rung, as there would be for a serving engine."""
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read")
    box = Box(tmp_path, applianced, demo_model, **{"ladder.prove": "off", "diagnosis.kernel_log": "/dev/kmsg"})
    held = sizes_of(box.served()["engine_pid"])["RssAnon"]
    (memory_cgroup / "memory.limit_in_bytes").write_text(str(held + 1024 * KV_TOKEN_BYTES + 30 * MIB))
    box.limits.write_text(f"echo $$ > {memory_cgroup}/cgroup.procs\n")
    box.again(**{"ladder.prove": "always"})
    status = box.served()
    assert status["rung"]["index"] > 0
    first = box.one.ask("incidents", limit=100)["incidents"][-1]
    assert first["diagnosis"]["cause"] == "host_oom"
    assert (first["phase"], first["action"]["kind"], first["rung_before"]) == ("start", "restart_safer", 0)
    box.one.stop()


def test_a_stop_cuts_a_proof_short(applianced: Start, tmp_path: Path, demo_model: Path) -> None:
    """applianced ends in order within seconds, without an incident, whatever the prompt would still take; nothing is held to be proved."""
    box = Box(tmp_path, applianced, demo_model, **{
        "ladder.prove": "always", "engine.context_length_tokens": "8192", "engine.prefill_chunk_tokens": "64",
        "engine.kv_pool_bytes": "1GiB",
    })  # fmt: skip
    status = box.wait(lambda status: "is being proved by a prompt of" in status["sentence"], "the proof runs")
    assert status["state"] == "proving"
    began_s = time.monotonic()
    assert box.one.stop() == 0
    assert time.monotonic() - began_s < 10
    with contextlib.suppress(ProcessLookupError):
        assert not is_alive(status["engine_pid"])
    assert box.runs == 0
    box.one.start()
    assert box.one.wait_state("starting", "proving", "waiting_for_gpu", "planning")["last_incident"] is None
    assert box.one.stop() == 0
