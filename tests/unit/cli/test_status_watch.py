"""`appliancectl status --watch`: a line a change, and that applianced is away is one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.cli.conftest import Applianced


def test_a_line_for_each_change(applianced: Applianced) -> None:
    """Not one a second; Ctrl-C ends it with 0."""
    applianced.answers["status"] = {"state": "serving", "generation": 1, "sentence": "serving"}
    command = [sys.executable, "-m", "appliance.cli", "--run-dir", str(applianced.run_dir), "status", "--watch", "--json"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    try:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        asked = len(applianced.asked)
        due_s = time.monotonic() + 20
        while len(applianced.asked) < asked + 3:
            assert time.monotonic() < due_s
            time.sleep(0.02)
        applianced.answers["status"] = {"state": "backoff", "generation": 1, "sentence": "the engine died"}
        second = json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
        assert watching.stdout.read() == ""
    finally:
        watching.kill()
        watching.wait()
    assert (first["state"], second["state"], second["sentence"]) == ("serving", "backoff", "the engine died")
