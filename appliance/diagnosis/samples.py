"""One worked sample a label, from `samples.toml`: the least evidence from which `diagnose` comes to it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

from appliance.core.causes import Cause
from appliance.core.errors import ApplianceError
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.reading.intake import exit_evidence

SAMPLES_FILE = Path(__file__).parent / "samples.toml"


def sample_of(cause: Cause) -> tuple[Evidence, ...]:
    """The evidence of this label's sample, in order."""
    return _samples()[cause]


@functools.cache
def _samples() -> dict[Cause, tuple[Evidence, ...]]:
    document = tomllib.loads(SAMPLES_FILE.read_text(encoding="utf-8"))
    samples = {Cause.of(label): _evidence(table) for label, table in document.items()}
    missing = [cause.label for cause in Cause if not samples.get(cause)]
    if missing:
        raise ApplianceError(f"{SAMPLES_FILE.name} has no sample for {missing}", hint="every label needs one")
    return samples


def _item(source: Source, line: object, number: int) -> Evidence:
    """A line, or a table of its text and the fields that need no parsing."""
    if isinstance(line, dict):
        return Evidence(source, str(line["text"]), data={name: value for name, value in line.items() if name != "text"})
    return Evidence(source, str(line), line=number)


def _evidence(table: Mapping[str, object]) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    for name, value in table.items():
        if isinstance(value, list):
            found += [_item(Source(name), line, number) for number, line in enumerate(value, 1)]
        else:
            found.append(exit_evidence(str(value)))
    return tuple(found)
