"""Worked cases with something missing: what a verdict is worth where it cannot be right any more.

A pattern that was never written, a log that was cut, a file that nobody gave: of such evidence the true cause is often gone, and
whatever is said instead should be said with doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, load_catalogue
from appliance.diagnosis.catalogue import Catalogue
from appliance.diagnosis.pattern import Kind, Pattern, Value
from tests.unit.diagnosis.corpus_cases import CorpusCase

FILES = (Source.ENGINE_LOG, Source.KERNEL_LOG, Source.SYSTEMD, Source.NVIDIA_SMI, Source.EXIT)


@dataclass(frozen=True)
class Judged:
    """A verdict on a case in one state of damage."""

    case: CorpusCase
    damage: str
    verdict: Diagnosis

    @property
    def right(self) -> bool:
        """The cause is the case's."""
        return self.case.cause_is_right(self.verdict)

    @property
    def wrong(self) -> bool:
        """Another cause is named; `unknown` names none."""
        return not self.right and self.verdict.cause is not Cause.UNKNOWN

    @property
    def confidence(self) -> Confidence:
        """Of the verdict."""
        return self.verdict.confidence


Damage = Callable[[CorpusCase, Sequence[Evidence]], Iterator[tuple[Sequence[Evidence], Catalogue | None]]]


def whole(_case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """Nothing is missing."""
    yield evidence, None


def unknown_wording(case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """No pattern is written for the root line."""
    root = diagnose(evidence, stopped_by_us=case.stopped_by_us).root
    if root is None or case.cause.startswith("ok_") or case.cause == "unknown":
        return
    known = frozenset(
        pattern.pattern_id
        for pattern, _fields in load_catalogue().matches(root.text, root.source)
        if pattern.kind is not Kind.MILESTONE and pattern.pattern_id != "python.exception"
    )
    if known:
        yield evidence, without(known)


def unknown_label(case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """No pattern is written for the case's cause at all."""
    known = frozenset(
        pattern.pattern_id for pattern in load_catalogue().patterns if pattern.cause is not None and pattern.cause.label == case.cause
    )
    if known and not case.cause.startswith("ok_"):
        yield evidence, without(known)


def cut_before_root(case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """The engine's log ends before the line that tells."""
    root = diagnose(evidence, stopped_by_us=case.stopped_by_us).root
    if root is not None and root.source is Source.ENGINE_LOG and root.line > 1 and not case.cause.startswith("ok_"):
        yield [item for item in evidence if item.source is not Source.ENGINE_LOG or item.line < root.line], None


def cut_tail(_case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """The last third of the engine's log is missing."""
    last = max((item.line for item in evidence if item.source is Source.ENGINE_LOG), default=0)
    if last >= 6:
        yield [item for item in evidence if item.source is not Source.ENGINE_LOG or item.line <= last * 2 // 3], None


def cut_head(_case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """The first third of the engine's log is missing."""
    last = max((item.line for item in evidence if item.source is Source.ENGINE_LOG), default=0)
    if last >= 6:
        yield [item for item in evidence if item.source is not Source.ENGINE_LOG or item.line > last // 3], None


def missing_file(_case: CorpusCase, evidence: Sequence[Evidence]) -> Iterator[tuple[Sequence[Evidence], Catalogue | None]]:
    """One of the files was not given."""
    given = [source for source in FILES if any(item.source is source for item in evidence)]
    if len(given) > 1:
        for source in given:
            yield [item for item in evidence if item.source is not source], None


DAMAGES: dict[str, Damage] = {
    "whole": whole,
    "unknown-wording": unknown_wording,
    "unknown-label": unknown_label,
    "cut-before-root": cut_before_root,
    "cut-tail": cut_tail,
    "cut-head": cut_head,
    "missing-file": missing_file,
}


class _Without(Catalogue):
    """The catalogue, blind to some of its patterns: a new one takes a tenth of a second to prepare."""

    def __init__(self, patterns: frozenset[str]) -> None:
        vars(self).update(vars(load_catalogue()))
        self._left_out = patterns

    def matches(self, text: str, source: Source) -> Iterator[tuple[Pattern, dict[str, Value]]]:
        for pattern, fields in super().matches(text, source):
            if pattern.pattern_id not in self._left_out:
                yield pattern, fields


def without(patterns: frozenset[str]) -> Catalogue:
    """The catalogue without these patterns."""
    return _Without(patterns)


def judge(cases: Sequence[CorpusCase], damage: str) -> Iterator[Judged]:
    """Every case in this state."""
    for case in cases:
        for evidence, catalogue in DAMAGES[damage](case, case.evidence()):
            verdict = diagnose([replace(item) for item in evidence], stopped_by_us=case.stopped_by_us, catalogue=catalogue)
            yield Judged(case, damage, verdict)
