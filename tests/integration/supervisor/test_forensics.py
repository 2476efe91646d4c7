"""The second unexplained crash of one kind, and what the instruments of the third life show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.supervisor.harness import Applianced, wait_for
from tests.integration.supervisor.test_own_findings import NATIVE, model_folder

Start = Callable[..., Applianced]
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"


def environment_of(pid: int) -> dict[str, str]:
    """Of a process."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def serving(one: Applianced, above: int) -> dict[str, Any]:
    """The status of the next life: a real engine takes its seconds."""

    def reached() -> dict[str, Any] | None:
        status = one.status()
        return status if status.get("state") in ("serving", "degraded") and status["generation"] > above else None

    found: dict[str, Any] = wait_for(reached, f"a life above {above}", 90)
    return found


def test_an_illegal_access_that_comes_again(applianced: Start) -> None:
    """A child as SGLang's: after the second one it is started with CUDA's dumps and NCCL's recorder; what they leave is told; then off."""
    one = applianced()
    for life in range(2):
        before = serving(one, life)
        assert "CUDA_COREDUMP_FILE" not in environment_of(before["engine_pid"])
        one.fault(kind="script", steps=[{"kind": "log", "text": ILLEGAL}, {"kind": "exit", "code": 1}])
    armed = serving(one, 2)
    environment = environment_of(armed["engine_pid"])
    assert environment["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert environment["PYTHONFAULTHANDLER"] == "1"
    assert "on since" in armed["sensors"]["forensics"]["detail"]
    assert "they cost" in one.log.read_text()
    one.fault(kind="script", steps=[{"kind": "dump"}, {"kind": "log", "text": ILLEGAL}, {"kind": "exit", "code": 1}])
    serving(one, 3)
    newest = wait_for(
        lambda: (incident := one.ask("incident")["incident"]) and any("NCCL" in item["text"] for item in incident["evidence"]) and incident,
        "the dumps are added",
    )
    told = diagnosed(one, newest["incident_id"])
    assert any("CUDA core dump" in item and "cuda-gdb" in item for item in told)
    assert any("number 812 of [[1, 4096]], started, called in all_reduce (parallel_state.py:412)" in item for item in told)
    wait_for(lambda: "off" in one.status()["sensors"]["forensics"]["detail"], "they are off again")
    one.fault(kind="exit", code=1)
    assert "CUDA_COREDUMP_FILE" not in environment_of(serving(one, 4)["engine_pid"])


def diagnosed(one: Applianced, incident: str) -> list[str]:
    """What `appliancectl diagnose` says was found in stacks and dumps."""
    command = [sys.executable, "-m", "appliance.cli", "--run-dir", one.run_dir, "--state-dir", one.state_dir]
    said = subprocess.run([*command, "diagnose", "--json", "--incident", incident], capture_output=True, text=True, timeout=60)
    found: list[str] = json.loads(said.stdout)["dumps"]
    return found


def test_the_real_engine_s_stacks(applianced: Start, tmp_path: Path) -> None:
    """The built-in engine, ended by SIGABRT thrice: after the second it has instruments, and after the third its stack is told."""
    settings = NATIVE | {"model.path": str(model_folder(tmp_path / "tiny")), "engine.kv_pool_bytes": "16MiB"}
    one = applianced(settings=settings | {"supervisor.start_failures_max": "5"})
    for life in range(3):
        status = serving(one, life)
        assert ("PYTHONFAULTHANDLER" in environment_of(status["engine_pid"])) == (life == 2)
        os.kill(status["engine_pid"], signal.SIGABRT)
    serving(one, 3)
    wait_for(lambda: any(item["source"] == "stack" for item in one.ask("incident")["incident"]["evidence"]), "the stack is added")
    told = diagnosed(one, one.ask("incident")["incident"]["incident_id"])
    assert any(item.startswith("faulthandler (Aborted): the thread was in ") and ".py:" in item for item in told), told
    wait_for(lambda: "off" in one.status()["sensors"]["forensics"]["detail"], "they are off again")
