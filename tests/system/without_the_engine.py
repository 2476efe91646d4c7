"""A pytest plugin for machines that have the package alone: test modules that need the engine's libraries, or a client's, are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

_NEEDED = re.compile(r"No module named '(gguf|numpy|openai|pynvml|tokenizers|torch)'")


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module that cannot be imported for such a reason, and for no other."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    missing = _NEEDED.search(str(report.longrepr)) if report.failed else None
    if missing:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
