"""applianced processes that are ended whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.supervisor.harness import Applianced


@pytest.fixture
def applianced(tmp_path: Path) -> Iterator[Callable[..., Applianced]]:
    """Start one; its arguments are Applianced's."""
    started: list[Applianced] = []

    def start(*engine: str, **options: Any) -> Applianced:
        started.append(Applianced(tmp_path, *engine, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
