"""The run directory: one applianced at a time, the control socket, the engines' sockets, and the last generation."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from appliance.control.protocol import SOCKET_PATH_MAX_BYTES
from appliance.core.errors import ApplianceError

LONGEST_SOCKET_NAME = "engine-9999999999.sock"


class RunDir:
    """Owns the lock. Usually on a tmpfs: what is here survives applianced, not the boot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control_socket = path / "control.sock"
        self._lock_file = path / "applianced.lock"
        self._generation_file = path / "generation"
        self._lock = -1

    def take(self) -> None:
        """Make the directory and lock it for the life of this process.

        Raises:
            ApplianceError: it cannot be made, or another applianced has it.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ApplianceError(
                f"the run directory {self.path} cannot be used: {error.strerror}", hint="choose another with --run-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ApplianceError(
                f"applianced runs already on {self.path} (pid {pid})", hint="stop it, or choose another directory with --run-dir"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds, and only the message above lacks our number
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def replica(self, index: int) -> RunDir:
        """That of one engine of several, in this one, whose lock is its own too.

        Raises:
            ApplianceError: it cannot be made, or its path leaves no room for an engine's socket.
        """
        path = self.path / f"replica-{index}"
        longest = len(os.fsencode(path / LONGEST_SOCKET_NAME))
        if longest > SOCKET_PATH_MAX_BYTES:
            raise ApplianceError(
                f"sockets in {path} would have paths of {longest} bytes, the kernel's limit is {SOCKET_PATH_MAX_BYTES}",
                hint="choose a shorter run directory",
            )
        try:
            path.mkdir(mode=0o750, exist_ok=True)
        except OSError as error:
            raise ApplianceError(
                f"the run directory {path} cannot be made: {error.strerror}", hint="is something else in its place?"
            ) from error
        return RunDir(path)

    @property
    def generation(self) -> int:
        """The last engine life that was started from here; 0 where nobody knows."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._generation_file.read_text())
        return 0

    def note_generation(self, generation: int) -> None:
        """Before the life is started. Beside the database, because a full disk may not make the generation go back."""
        with contextlib.suppress(OSError):
            fresh = self._generation_file.with_suffix(".new")
            fresh.write_text(str(generation))
            fresh.replace(self._generation_file)

    def remove_engine_sockets(self) -> None:
        """Left behind by engines that were killed. Only called while nobody of ours is alive."""
        for socket_file in self.path.glob("engine-*.sock"):
            with contextlib.suppress(OSError):
                socket_file.unlink()
