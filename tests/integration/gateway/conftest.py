"""A short folder for sockets: pytest's own may be longer than a unix socket's path can be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Removed after the test."""
    path = Path(tempfile.mkdtemp(prefix="gw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
