"""Accuracy on the worked cases and on our own variants of them."""

from __future__ import annotations

import pytest

from appliance.core.diagnosis import Confidence, Role
from tests.unit.diagnosis.corpus_cases import CORPUS, CorpusCase, load

WORKED = load(CORPUS)
VARIANTS = load(CORPUS / "variants")
EXAM = load(CORPUS / "exam")
"""Cases that were written and judged by somebody who had not seen the patterns, and were first run when those were finished."""


@pytest.mark.parametrize("flagged", [True, False], ids=["flagged", "found-out"])
def test_worked_cases_are_right(flagged: bool) -> None:
    """At least 97 % of the causes and 95 % of the root lines, whether or not the files' kinds are given."""
    verdicts = [(case, case.diagnosis(flagged=flagged)) for case in WORKED]
    wrong = [f"{case.name}: {verdict.cause.label}" for case, verdict in verdicts if verdict.cause.label != case.cause]
    astray = [case.name for case, verdict in verdicts if not case.root_is_right(verdict)]
    assert len(WORKED) >= 81
    assert len(wrong) <= 0.03 * len(WORKED), wrong
    assert len(astray) <= 0.05 * len(WORKED), astray


def test_variants_are_right() -> None:
    """Other spellings, versions and wrappers of every label: at least 97 %, and nothing is wrong with confidence."""
    verdicts = [(case, case.diagnosis()) for case in VARIANTS]
    wrong = [(case.name, verdict.cause.label, verdict.confidence) for case, verdict in verdicts if verdict.cause.label != case.cause]
    assert len(wrong) <= 0.03 * len(VARIANTS), wrong
    assert not [item for item in wrong if item[2] is Confidence.HIGH]


@pytest.mark.parametrize("flagged", [True, False], ids=["flagged", "found-out"])
def test_the_blind_examination_stays_passed(flagged: bool) -> None:
    """At least 97 % of the causes and 95 % of the root lines of cases that somebody else chose; no wrong cause with confidence."""
    verdicts = [(case, case.diagnosis(flagged=flagged)) for case in EXAM]
    wrong = [(case.name, verdict.cause.label, verdict.confidence) for case, verdict in verdicts if not case.cause_is_right(verdict)]
    astray = [case.name for case, verdict in verdicts if not case.root_is_right(verdict)]
    assert len(EXAM) >= 599
    assert len(wrong) <= 0.03 * len(EXAM), wrong
    assert not [item for item in wrong if item[2] is Confidence.HIGH]
    assert len(astray) <= 0.05 * len(EXAM), astray


def test_every_label_has_two_cases() -> None:
    """No label rests on a single example."""
    counts: dict[str, int] = {}
    for case in WORKED + VARIANTS:
        counts[case.cause] = counts.get(case.cause, 0) + 1
    assert not [label for label, count in counts.items() if count < 2]


@pytest.mark.parametrize("case", [case for case in WORKED + VARIANTS + EXAM if case.cause.startswith("ok_")], ids=lambda case: case.name)
def test_what_did_not_crash_is_not_called_a_crash(case: CorpusCase) -> None:
    """Every `ok_*` case: `diagnose` exits 0."""
    assert not case.diagnosis().crashed


@pytest.mark.parametrize("case", WORKED + VARIANTS + EXAM, ids=lambda case: case.name)
def test_each_verdict_can_be_followed(case: CorpusCase) -> None:
    """A crash with a cause names a root that is in the evidence, first in its chain, once; nothing refutes itself."""
    verdict = case.diagnosis()
    given = {item.text for item in case.evidence()} | {""}
    assert verdict.sentence.endswith(".")
    assert verdict.cause not in {item.cause for item in verdict.refuted}
    if verdict.crashed and verdict.cause.label != "unknown":
        assert verdict.root is not None
        assert verdict.remedies
        assert verdict.chain[0].role is Role.ROOT
        assert [link.role for link in verdict.chain].count(Role.ROOT) == 1
        assert verdict.root.line == 0 or verdict.root.text in given
