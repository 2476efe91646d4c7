"""A whole appliance from the command line: `appliancectl run` with real children, in a state folder of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from appliance.control import client

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll a condition with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


class Foreground:
    """One `appliancectl run`."""

    wait_until = staticmethod(wait_until)

    def __init__(self, state_dir: Path, *arguments: str) -> None:
        self.state_dir = state_dir
        self.started_s = time.monotonic()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", "--state-dir", str(state_dir), "run", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def said(self) -> str:
        """Everything it printed so far."""
        return "".join(list(self.lines))

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first match in what it prints."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(re.finditer(pattern, self.said))
            assert found or self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.said}"
            return bool(found)

        try:
            wait_until(look, f"a line that matches {pattern!r}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said}") from None
        return found[0]

    def wait_until_serving(self) -> tuple[str, str]:
        """The model's id and the base URL it printed."""
        match = self.wait_for(r"Serving (\S+) at (http://\S+)/v1 ")
        return match[1], match[2]

    def status(self) -> dict:
        """What applianced says of itself."""
        return client.ask((self.state_dir / "run").resolve() / "control.sock", "status")

    @property
    def engine_pid(self) -> int:
        """The process that serves: the spare beside it has the same module."""
        pid = self.status()["engine_pid"]
        assert pid, "no engine right now"
        return int(pid)

    def ctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """appliancectl about this appliance, as a person in another terminal would call it."""
        command = [sys.executable, "-m", "appliance.cli", "--state-dir", str(self.state_dir), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    def descendants(self) -> dict[int, str]:
        """Every process below it: pid → command line."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def pid_of(self, module: str) -> int | None:
        """The child that runs `python -m module`, if there is one right now."""
        return next((pid for pid, command in self.descendants().items() if f"-m {module}" in command), None)

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Ctrl-C; the exit code. Fails if a process of it is left."""
        pids = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), f"all processes gone of {pids}", 10)
        return code


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A state folder with a short path, as in a home folder."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        yield Path(folder)


@pytest.fixture
def foreground(state_dir: Path) -> Iterator[Callable[..., Foreground]]:
    """Start `appliancectl run`; whatever the test does, nothing of it is left afterwards."""
    started: list[Foreground] = []

    def start(*arguments: str) -> Foreground:
        started.append(Foreground(state_dir, *arguments))
        return started[-1]

    yield start
    for run in started:
        pids = [run.process.pid, *run.descendants()]
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(30)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model, brought and converted once for all tests of this checkout."""
    models = ROOT / ".cache" / "models"
    subprocess.run(
        [sys.executable, "-m", "appliance.cli", "setup", "--demo", "--models-dir", str(models)], cwd=ROOT, check=True, timeout=600
    )
    return models / "SmolLM2-135M-Instruct"
