"""docs/failures.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, with_operator_patterns
from appliance.diagnosis.samples import sample_of
from appliance.supervisor.failures_page import page


def test_the_page_is_as_the_tables() -> None:
    """`python -m appliance.supervisor.failures_page > docs/failures.md` after a change."""
    assert (Path(__file__).parents[3] / "docs" / "failures.md").read_text(encoding="utf-8") == page()


def test_the_page_s_own_pattern_can_be_used(tmp_path: Path) -> None:
    """Copied into a file it is a pattern, and its sample gets its label."""
    (tmp_path / "site.toml").write_text(page().partition("```toml\n")[2].partition("```")[0])
    catalogue, problems = with_operator_patterns(tmp_path)
    assert problems == ()
    line = Evidence(Source.ENGINE_LOG, "RAID volume md0 is gone")
    assert diagnose([line], catalogue=catalogue).cause is Cause.MODEL_MISSING
    assert catalogue.fatal(line.text) == "site.raid_gone"


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
def test_each_section_is_whole(cause: Cause) -> None:
    """A sample, a meaning, what the appliance does; and what the owner should do, wherever something is wrong and known."""
    section = page().partition(f"\n### {cause.label}\n")[2].partition("\n#")[0]
    assert section.count("```") == 2
    assert "**The appliance.** " in section
    assert ("**You.**\n1. " in section) or cause.is_ok or cause is Cause.UNKNOWN
    assert "{" not in section.rpartition("```")[2]


@pytest.mark.parametrize("cause", list(Cause), ids=lambda cause: cause.label)
def test_each_sample_is_of_its_cause(cause: Cause) -> None:
    """Whoever has these lines and nothing else is told this label."""
    assert diagnose(sample_of(cause)).cause is cause
