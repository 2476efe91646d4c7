"""Evidence to verdict: what ended the engine, why, and what to do. Pure, and offline on any box's logs.

* `read_evidence` and `exit_evidence` make evidence of files and words (`reading/`)
* `diagnose` makes the verdict of it (`verdict.py`)
* `report` prints it
* `is_fatal_line` is the quick test of a fresh line; with an operator's patterns: `with_operator_patterns(folder)[0].fatal`
"""

from __future__ import annotations

from appliance.diagnosis import report
from appliance.diagnosis.catalogue import load_catalogue, with_operator_patterns
from appliance.diagnosis.reading.intake import exit_evidence, read_evidence
from appliance.diagnosis.remedies import action_for
from appliance.diagnosis.verdict import diagnose

__all__ = [
    "action_for", "diagnose", "exit_evidence", "is_fatal_line", "load_catalogue", "read_evidence", "report", "with_operator_patterns",
]  # fmt: skip


def is_fatal_line(line: str) -> str | None:
    """The id of the pattern by which this engine-log line alone means that the engine is gone or going, else None."""
    return load_catalogue().fatal(line)
