"""applianced processes that are ended whatever the test did."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.supervisor.harness import Applianced

Box = TypeVar("Box", bound=Applianced)


def each_ended(make: Callable[..., Box]) -> Iterator[Callable[..., Box]]:
    """Yields how to start one; all that were started are ended afterwards."""
    started: list[Box] = []

    def start(*engine: str, **options: Any) -> Box:
        started.append(make(*engine, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.fixture
def applianced(tmp_path: Path) -> Iterator[Callable[..., Applianced]]:
    """Start one; its arguments are Applianced's."""
    yield from each_ended(partial(Applianced, tmp_path))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the sockets of an engine in a folder of its own: a unix socket's has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="two-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
