"""Findings as doctor and `config check` print them."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.cli.checks.machine import Finding, Level
from appliance.cli.printing import bad, faint, good, say, uncertain

_MARKS = {Level.OK: good("ok  "), Level.WARN: uncertain("warn"), Level.FAIL: bad("fail")}


def say_finding(finding: Finding) -> None:
    """For people: a line, and its cure below it."""
    say(f"{_MARKS[finding.level]} {finding.name}: {finding.reason}")
    if finding.cure:
        say(f"       {faint('cure:')} {finding.cure}")


def as_row(finding: Finding) -> Mapping[str, str]:
    """For programs."""
    return {"name": finding.name, "level": finding.level.value, "reason": finding.reason, "cure": finding.cure}
