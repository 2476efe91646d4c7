"""Worked cases as evidence: how the tests read `tests/corpus`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, read_evidence

CORPUS = Path(__file__).parents[2] / "corpus"
TEXTS = {
    "engine_log": Source.ENGINE_LOG,
    "kernel_log": Source.KERNEL_LOG,
    "systemd": Source.SYSTEMD,
    "nvidia_smi": Source.NVIDIA_SMI,
}
TAKEN_S = 1_796_000_000.0
"""The cases' logs leave the year out now and then; any year will do, for clocks without one are compared as such."""


@dataclass(frozen=True)
class CorpusCase:
    """A case, its evidence, and what a person who read it says."""

    name: str
    cause: str
    roots: tuple[str, ...]
    raw: dict[str, object]
    also: tuple[str, ...] = ()
    """Other causes that a careful reader would accept."""

    def evidence(self, *, flagged: bool = True) -> list[Evidence]:
        """The evidence as given with its kind, or (not flagged) as files whose kind must be found out."""
        found: list[Evidence] = []
        for kind, value in self.raw.items():
            if kind in TEXTS:
                found += read_evidence(str(value), TEXTS[kind] if flagged else None, now_s=TAKEN_S)
            elif kind == "exit" and isinstance(value, dict):
                found.append(Evidence(Source.EXIT, "", data=value))
            elif kind == "probe" and isinstance(value, dict):
                found.append(Evidence(Source.PROBE, "", data=value))
        return found

    @property
    def stopped_by_us(self) -> bool:
        """Whoever gave the evidence had asked for the stop."""
        return self.raw.get("stopped_by_us") is True

    def diagnosis(self, *, flagged: bool = True) -> Diagnosis:
        """Our verdict."""
        return diagnose(self.evidence(flagged=flagged), stopped_by_us=self.stopped_by_us)

    def cause_is_right(self, verdict: Diagnosis) -> bool:
        """Our cause is the case's, or one that it accepts too."""
        return verdict.cause.label in (self.cause, *self.also)

    def root_is_right(self, verdict: Diagnosis) -> bool:
        """Our root line is one of the case's, in whole or in part."""
        if not any(self.roots):
            return True
        ours = verdict.root.text.strip() if verdict.root is not None else ""
        return bool(ours) and any(theirs in ours or ours in theirs for theirs in self.roots if theirs)


def load(folder: Path) -> list[CorpusCase]:
    """The cases of a folder, by name."""
    cases = []
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        roots = [row["primary_evidence"], *(text for role, text in row.get("chain", []) if role in ("root", "same_event"))]
        roots += row.get("also_accept_primary", [])
        also = tuple(row.get("also_accept", []))
        cases.append(CorpusCase(path.stem, row["cause"], tuple(text.strip() for text in roots), row["evidence"], also))
    return cases
