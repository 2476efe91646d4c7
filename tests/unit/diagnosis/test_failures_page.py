"""docs/failures.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

from appliance.diagnosis.failures_page import page


def test_the_page_is_as_the_tables() -> None:
    """`python -m appliance.diagnosis.failures_page > docs/failures.md` after a change."""
    assert (Path(__file__).parents[3] / "docs" / "failures.md").read_text(encoding="utf-8") == page()
