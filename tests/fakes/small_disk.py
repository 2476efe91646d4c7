"""A real disk of a few pages, or one that is mounted read-only: full and unwritable as they are, without a mock."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")


@contextlib.contextmanager
def small_disk(place: Path, options: str = "size=64k") -> Iterator[Path]:
    """A tmpfs with mount(8)'s options, gone afterwards; the test is skipped where none can be mounted."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", place], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """To the last byte; the file that does it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler
