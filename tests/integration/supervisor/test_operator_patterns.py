"""An operator's own patterns of log lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.integration.supervisor.harness import Applianced

Start = Callable[..., Applianced]
PATTERN = """
[[pattern]]
id = "site.raid"
kind = "cause"
event = "model_missing"
cause = "model_missing"
tier = 2
source = "a mount script"
literals = ["qq7"]
regex = "qq7 is gone"
samples = ["the qq7 is gone"]
"""


def test_applianced_judges_by_them_and_starts_in_spite_of_a_broken_file(applianced: Start, tmp_path: Path) -> None:
    """The incident has the operator's cause; the file that cannot be right is named in the log and costs nothing."""
    folder = tmp_path / "patterns.d"
    folder.mkdir()
    (folder / "a.toml").write_text(PATTERN)
    (folder / "b.toml").write_text(PATTERN.replace("site.raid", "site.greedy").replace('"qq7 is', '".*qq7 is'))
    settings = {"diagnosis.patterns_dir": str(folder), "supervisor.start_failures_max": "1"}
    one = applianced("--fail-start", "the qq7 is gone", settings=settings)
    one.wait_state("parked")
    incident = one.wait_incident()[0]
    assert incident["diagnosis"]["cause"] == "model_missing"
    assert incident["diagnosis"]["root"]["text"].endswith("the qq7 is gone")
    log = one.log.read_text()
    assert f"{folder / 'b.toml'} is left out" in log
    assert "site.greedy" in log
