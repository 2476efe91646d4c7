"""A new environment of the engine that does not start: the one that served is put in force again."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.runtimes import current_runtime, put_in_force
from tests.integration.supervisor.harness import QUICK, ROOT, Applianced

BROKEN = "echo 'ImportError: libtorch_cpu.so: undefined symbol: _ZN3c10' >&2; exit 1"


def _runtime(box: Path, name: str, does: str) -> Path:
    folder = box / "state" / "runtimes" / name
    (folder / "bin").mkdir(parents=True)
    (folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}").mkdir(parents=True)
    (folder / "bin/python").write_text(f"#!/bin/sh\n{does}\n")
    (folder / "bin/python").chmod(0o755)
    return folder


@pytest.mark.parametrize("harm", ["it-cannot-start", "it-is-gone"])
def test_the_service_outlives_a_runtime_that_cannot_start(applianced: Callable[..., Applianced], tmp_path: Path, harm: str) -> None:
    """Switched to it, the engine dies: back on the old one with the reason, also for the starts after it; nobody is parked."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text('{"max_position_embeddings": 4096}')
    good = _runtime(tmp_path, "native-1.0", f'exec "{sys.executable}" "{ROOT}/tests/fakes/native.py" "{tmp_path}" "$@"')
    broken = _runtime(tmp_path, "native-2.0", BROKEN)
    put_in_force(good)
    one = applianced(settings=QUICK | {"engine.backend": "native", "engine.warm_spare": "false", "model.path": str(tmp_path / "model")})
    before = one.wait_state("serving")
    put_in_force(broken)
    if harm == "it-is-gone":
        shutil.rmtree(broken)
    os.kill(before["engine_pid"], signal.SIGKILL)
    after = one.wait_state("serving", above=before["generation"])
    assert after["generation"] == (3 if harm == "it-cannot-start" else 2)
    assert current_runtime(tmp_path / "state") == good
    newest, first = one.wait_incident(2)
    assert (newest["action"]["kind"], first["action"]["kind"]) == ("roll_back", "restart_same")
    assert newest["action"]["basis"].startswith("went back to the runtime native-1.0 from native-2.0, which has never served, because ")
    assert newest["recovered_s"] is not None
