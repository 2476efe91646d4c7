"""What the checks read: files below a root folder and the output of commands, so that tests can lay out any machine."""

from __future__ import annotations

import enum
import importlib.util
import os
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_TIMEOUT_S = 10.0


class Level(enum.Enum):
    """How bad it is. `fail`: an engine will not start or not stay; `warn`: it will cost speed, or bite one day."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what, how bad, why, and the command or the deed that cures it.

    Attributes:
        unseen: this user may not look, so that nothing is known: bad only for what this very user is to serve with.
    """

    name: str
    level: Level
    reason: str
    cure: str = ""
    unseen: bool = False


def ok(name: str, reason: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, reason)


def warn(name: str, reason: str, cure: str) -> Finding:
    """See Level."""
    return Finding(name, Level.WARN, reason, cure)


def fail(name: str, reason: str, cure: str) -> Finding:
    """See Level."""
    return Finding(name, Level.FAIL, reason, cure)


def unseen(name: str, path: Path, barrier: Path) -> Finding:
    """What stands behind a door that is closed to this user is not called missing."""
    reason = f"{path}: this user may not read {barrier}, so whether it is in order is not known"
    return Finding(name, Level.WARN, reason, "look again as root, or as the user that serves", unseen=True)


def barrier_of(path: Path) -> Path | None:
    """The folder or file on the way to `path`, itself included, that this user may not read; None where it is free, or nothing is there."""
    whole = path.absolute()
    for step in (*reversed(whole.parents), whole):
        try:
            facts = step.stat()
        except PermissionError:
            return step.parent
        except OSError:
            return None
        if not os.access(step, os.X_OK if stat.S_ISDIR(facts.st_mode) else os.R_OK):
            return step
    return whole if whole.is_dir() and not os.access(whole, os.R_OK) else None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; code None: there is no such command, or it took too long."""

    code: int | None
    output: str = ""

    @property
    def good(self) -> bool:
        """It ran and succeeded."""
        return self.code == 0


def run_command(command: Sequence[str]) -> Ended:
    """With a deadline, and without waiting for one that survives it: nvidia-smi on a lost card sleeps where no signal reaches."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError:
        return Ended(None)
    try:
        output, _ = child.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return Ended(None, f"no answer within {COMMAND_TIMEOUT_S:g} s")
    return Ended(child.returncode, output)


@dataclass(frozen=True, slots=True)
class Machine:
    """The one that is looked at.

    Attributes:
        root: where its files are.
        run: runs a command on it.
        has_module: whether the control plane's Python finds a module.
        user_groups: the numbers of the groups of the service's user; empty where there is no such user.
    """

    root: Path = Path("/")
    run: Callable[[Sequence[str]], Ended] = run_command
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    user_groups: frozenset[int] = frozenset()
    answers: dict[tuple[str, ...], Ended] = field(default_factory=dict)

    def path(self, path: str) -> Path:
        """Below the root."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """A small file; empty where it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def find(self, pattern: str) -> tuple[Path, ...]:
        """Files below the root, in the order of their names."""
        return tuple(sorted(self.root.glob(pattern.lstrip("/"))))

    def ask(self, *command: str) -> Ended:
        """Run a command once, however many checks want its answer."""
        if command not in self.answers:
            self.answers[command] = self.run(command)
        return self.answers[command]


def properties(text: str) -> Mapping[str, str]:
    """KEY=VALUE lines, as `systemctl show` prints them."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
