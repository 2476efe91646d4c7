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


def _evidence(table: Mapping[str, object]) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    for name, value in table.items():
        if isinstance(value, list):
            found += [Evidence(Source(name), str(text), line=number) for number, text in enumerate(value, 1)]
        else:
            found.append(exit_evidence(str(value)))
    return tuple(found)
