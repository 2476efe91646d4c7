"""A real applianced with a fake engine, on folders of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.control.client import ask
from appliance.core.errors import ControlError
from appliance.supervisor import proc_table

ROOT = Path(__file__).parents[3]
FAKE_ENGINE = ROOT / "tests/fakes/engine.py"
DEADLINE_S = 20.0
"""Read at each wait: a run on a busy machine may raise it."""
QUICK = {
    "supervisor.probe_interval_s": "0.1",
    "supervisor.probe_timeout_s": "0.3",
    "supervisor.hang_floor_s": "0.8",
    "supervisor.hang_ceiling_s": "3",
    "supervisor.backoff_first_s": "0.1",
    "supervisor.backoff_max_s": "0.4",
    "supervisor.stop_deadline_s": "5",
    "gateway.drain_s": "5",
    "diagnosis.kernel_log": "",
}
"""Detection and waits short enough for tests; everything else as shipped."""


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float | None = None) -> Any:
    """Its first true value; None: DEADLINE_S."""
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"{what} did not happen within {deadline_s:g} s"
        time.sleep(0.005)
    return value


class Applianced:
    """One applianced process and questions to it."""

    def __init__(
        self,
        folder: Path,
        *engine: str,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        cgroup: Path | None = None,
        program: Sequence[str] = ("-m", "appliance.supervisor"),
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.state_dir = folder / "state"
        self.log = folder / "log"
        command = [sys.executable, str(FAKE_ENGINE), "--socket", "{socket}", "--max-running", "{max_running}", *engine]
        chosen = {"engine.backend": "custom", "engine.command": json.dumps(command)} | QUICK | dict(settings or {})
        if chosen["engine.backend"] != "custom":
            del chosen["engine.command"]
        self._arguments = ["--state-dir", str(self.state_dir), "--run-dir", str(self.run_dir)]
        for key, value in chosen.items():
            self._arguments += ["--set", f"{key}={value}"]
        self._environment = dict(os.environ) | dict(environment or {})
        self._cgroup = cgroup
        self._program = program
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Begin, or begin again on the same folders."""
        (self.folder / "appliance.toml").touch()
        argv = [sys.executable, *self._program, "--config", str(self.folder / "appliance.toml"), *self._arguments]
        if self._cgroup is not None:
            argv = ["/bin/sh", "-c", f'echo $$ > {self._cgroup}/cgroup.procs && exec "$@"', "sh", *argv]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=self._environment)
        return self.process

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """On the control socket."""
        return ask(self.run_dir / "control.sock", verb, **arguments)

    def status(self) -> dict[str, Any]:
        """Empty while nobody listens yet."""
        assert self.process.poll() is None, f"applianced ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}"
        try:
            return self.ask("status")
        except ControlError:
            return {}

    def wait_state(self, *states: str, above: int = -1) -> dict[str, Any]:
        """The status once it is in one of these states in a life above that generation."""

        def reached() -> dict[str, Any] | None:
            status = self.status()
            return status if status and status["state"] in states and status["generation"] > above else None

        try:
            found: dict[str, Any] = wait_for(reached, f"{'/'.join(states)} above generation {above}")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log ends:\n{self.log.read_text()[-2000:]}") from None
        return found

    def wait_incident(self, number: int = 1) -> list[dict[str, Any]]:
        """The incidents, newest first, once there are so many."""
        found: list[dict[str, Any]] = wait_for(
            lambda: len(listed := self.ask("incidents", limit=100)["incidents"]) >= number and listed, f"incident {number}"
        )
        return found

    def engine(self, path: str, body: Any = None, timeout_s: float = 5.0) -> dict[str, Any]:
        """Talk to the engine itself."""
        connection = http.client.HTTPConnection("engine", timeout=timeout_s)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(str(self.run_dir / f"engine-{self.status()['generation']}.sock"))
        connection.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def fault(self, **fault: Any) -> None:
        """Break the engine."""
        try:
            self.engine("/fault", fault)
        except OSError:
            pass  # it died of it before its answer was read
        except http.client.HTTPException:
            pass

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float | None = None) -> int:
        """End it, and give the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S if timeout_s is None else timeout_s)


def is_alive(pid: int) -> bool:
    """A process that is neither gone nor a zombie."""
    stat = proc_table.read_stat(pid)
    return stat is not None and stat.is_alive
