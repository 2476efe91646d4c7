"""The folders of a foreground appliance, and the lock that lets one `run` at a time have them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from appliance.cli.place import RUN_LINK
from appliance.control.protocol import SOCKET_PATH_MAX_BYTES
from appliance.core.errors import ApplianceError

LONGEST_SOCKET_NAME = "engine-9999999999.sock"
LOCK = "run.lock"
APPLIANCED_LOCK = "applianced.lock"
"""In the run folder, held by applianced as long as it lives."""
PRIVATE = 0o700


def prepare_state_dir(state_dir: Path) -> Path:
    """Make the folder, private to us; its absolute path.

    Raises:
        ApplianceError: it cannot be made, or is something else.
    """
    try:
        state_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        what = "is a file, not a folder" if state_dir.is_file() else error.strerror
        raise ApplianceError(f"state folder {state_dir}: {what}", hint="name another with --state-dir") from None
    return state_dir.resolve()


def lock_state_dir(state_dir: Path) -> IO[str]:
    """Hold the folder for this process; the lock ends with the returned file, or with us, whatever happens.

    Raises:
        ApplianceError: another `appliancectl run` has it; its pid is named.
    """
    try:
        file = (state_dir / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ApplianceError(f"{state_dir / LOCK}: {error.strerror}", hint="name another folder with --state-dir") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ApplianceError(
            f"`appliancectl run` is already at work on {state_dir} (pid {holder})",
            hint=f"stop it with `kill {holder}` or Ctrl-C in its terminal, or name another folder with --state-dir",
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, and only the next one's message lacks our number
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"{os.getpid()}\n".encode())
    return file


def prepare_run_dir(state_dir: Path) -> Path:
    """The folder for the sockets: `run` inside the state folder, or a link of that name to a shorter path.

    A unix socket's path has at most 107 bytes, and home folders on network drives are longer.

    Raises:
        ApplianceError: no folder of ours can be had.
    """
    place = state_dir / RUN_LINK
    if _short_enough(place):
        if place.is_symlink():
            place.unlink()
        return _private(place)
    digest = hashlib.blake2b(os.fsencode(state_dir), digest_size=4).hexdigest()
    base = os.environ.get("XDG_RUNTIME_DIR") or ""
    if base and _short_enough(Path(base) / f"llm-appliance-{digest}") and Path(base).is_dir():
        target = _private(Path(base) / f"llm-appliance-{digest}")
    else:
        target = _private(Path(tempfile.gettempdir()) / f"llm-appliance-{os.getuid()}-{digest}")
    if not _short_enough(target):
        raise ApplianceError(f"{target} is too long a path for unix sockets", hint="set TMPDIR to a shorter one, or use --run-dir")
    try:
        place.unlink(missing_ok=True)
        place.symlink_to(target)
    except OSError as error:
        raise ApplianceError(f"{place}: {error.strerror}", hint="name another folder with --run-dir") from None
    return target


def leave_run_dir(state_dir: Path) -> None:
    """Take away what prepare_run_dir has made outside of the state folder. Only when everything that used it has ended."""
    place = state_dir / RUN_LINK
    if place.is_symlink():
        shutil.rmtree(place.resolve(), ignore_errors=True)
        with contextlib.suppress(OSError):
            place.unlink()


def check_run_dir(run_dir: Path) -> Path:
    """The folder that --run-dir named, made if need be.

    Raises:
        ApplianceError: its path is too long for a unix socket, or it cannot be made.
    """
    if not _short_enough(run_dir.absolute()):
        longest = SOCKET_PATH_MAX_BYTES - len(LONGEST_SOCKET_NAME) - 1
        length = len(os.fsencode(run_dir.absolute()))
        raise ApplianceError(
            f"run folder {run_dir.absolute()} has {length} bytes, sockets leave room for {longest}", hint="shorten --run-dir"
        )
    try:
        run_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise ApplianceError(f"run folder {run_dir}: {error.strerror}", hint="name another with --run-dir") from None
    return run_dir.absolute()


def refuse_shared(run_dir: Path) -> None:
    """The engine of somebody else's run would be taken for ours.

    Raises:
        ApplianceError: an applianced works on this folder; its pid is named.
    """
    try:
        with (run_dir / APPLIANCED_LOCK).open("r+", encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read(32).strip() or "unknown"
                raise ApplianceError(
                    f"applianced runs already on {run_dir} (pid {holder})", hint="stop it, or name another folder with --run-dir"
                ) from None
    except FileNotFoundError:
        return
    except OSError as error:
        raise ApplianceError(f"run folder {run_dir}: {error.strerror}", hint="name another with --run-dir") from None


def _short_enough(run_dir: Path) -> bool:
    return len(os.fsencode(run_dir / LONGEST_SOCKET_NAME)) <= SOCKET_PATH_MAX_BYTES


def _private(folder: Path) -> Path:
    """Make a folder that only we can enter; refuse one that somebody else laid out in a shared place."""
    try:
        folder.mkdir(mode=PRIVATE, exist_ok=True)
    except OSError as error:
        raise ApplianceError(f"run folder {folder}: {error.strerror}", hint="name another with --run-dir") from None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ApplianceError(f"run folder {folder} is not private to this user", hint="remove it, or name another with --run-dir")
    return folder
