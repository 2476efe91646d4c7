"""`diagnose`: evidence in, verdict out. Pure; no clock, no files but the catalogue that is loaded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.diagnosis import ChainLink, Citation, Confidence, Diagnosis, Role
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.boots import set_aside
from appliance.diagnosis.case import Case, exit_of
from appliance.diagnosis.catalogue import Catalogue, load_catalogue
from appliance.diagnosis.causality import CLOCK_SLACK_S, Verdict, decide, distance_s, explains
from appliance.diagnosis.confidence import confidence_of, doubts_of
from appliance.diagnosis.events import Event
from appliance.diagnosis.harmless import harmless
from appliance.diagnosis.outlived import outlived
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.probes import answers_in, facts_of
from appliance.diagnosis.refuted import refuted
from appliance.diagnosis.remedies import advise
from appliance.diagnosis.rules import settle, translate
from appliance.diagnosis.scan import worth_reading
from appliance.diagnosis.timeline import events_of, fold, last_life
from appliance.diagnosis.unread import what_was_given

CHAIN_LINKS = 12
_UNTOLD = frozenset({Source.EXIT, Source.STOP_LEDGER})
"""What is given in words beside files."""
_RAISED = ("exception", "broken_invariant", "usage_error")
_STRENGTH = (Role.ROOT, Role.SAME_EVENT, Role.CONSEQUENCE, Role.EVENT, Role.SYMPTOM)
"""A line that is two things is shown as the stronger."""


def diagnose(
    evidence: Iterable[Evidence],
    *,
    stopped_by_us: bool = False,
    engine: str | None = None,
    catalogue: Catalogue | None = None,
) -> Diagnosis:
    """Root cause, chain, refuted suspects and remedies of what the evidence shows. Never raises on any evidence."""
    case = build_case(evidence, stopped_by_us=stopped_by_us, engine=engine, catalogue=catalogue)
    verdict = decide(case.events)
    root = verdict.root or harmless(case)
    if root is None or root.cause is None:
        return _unknown(case, verdict)
    doubts = doubts_of(root, verdict, case, catalogue or load_catalogue())
    advice = advise(root, case)
    return Diagnosis(
        cause=root.cause,
        confidence=confidence_of(doubts),
        sentence=advice.sentence,
        root=cite(root) if root.text else None,
        chain=_chain(root, case),
        refuted=refuted(root, verdict, case),
        remedies=advice.remedies,
        safer_config=advice.safer_config,
        numbers=advice.numbers,
        doubts=tuple(doubt.why for doubt in doubts),
    )


def build_case(
    evidence: Iterable[Evidence], *, stopped_by_us: bool = False, engine: str | None = None, catalogue: Catalogue | None = None
) -> Case:
    """The settled events of the engine life that the evidence is about."""
    items = list(evidence)
    patterns = catalogue or load_catalogue()
    events = events_of(((index, items[index]) for index in worth_reading(items, patterns)), patterns, translate)
    events += answers_in(items, patterns)
    events += facts_of(items)
    ends = [exit_of(item) for item in items if item.source is Source.EXIT]
    asked = stopped_by_us or any(item.source is Source.STOP_LEDGER for item in items)
    ended = next((end for end in reversed(ends) if end.known), exit_of(Evidence(Source.EXIT, "")))
    life, of_others = set_aside(last_life(events), events, items)
    life, survived = outlived(life)
    case = Case(fold(life), items, ended, asked, engine, tuple(fold((*of_others, *survived))))
    return replace(case, events=settle(case))


def cite(event: Event) -> Citation:
    """The event's evidence as quoted."""
    return Citation(event.source, event.evidence.line, event.text, event.evidence.time_s)


def _chain(root: Event, case: Case) -> tuple[ChainLink, ...]:
    """The root, what is the same event, what follows from it; at most a dozen links, in the order of their clocks."""
    best: dict[tuple[str, str], ChainLink] = {}
    for event in _in_order(case.events, root):
        role = _role(event, root)
        if role is None or not event.text or (role is Role.CONSEQUENCE and _stood_before(event, root)):
            continue
        key = (event.source.value, event.text)
        if key not in best or _STRENGTH.index(role) < _STRENGTH.index(best[key].role):
            best[key] = ChainLink(role, event.note or event.pattern_id or event.name, cite(event))
    links = list(best.values())
    roots = [link for link in links if link.role is Role.ROOT][:1] or [ChainLink(Role.ROOT, root.note or root.pattern_id, cite(root))]
    rest = [link for link in links if link.role is not Role.ROOT]
    ordered = roots + rest if not root.cause or not root.cause.is_ok else rest or roots
    return tuple(link for link in ordered if link.citation.text)[:CHAIN_LINKS]


def _in_order(events: Sequence[Event], root: Event) -> list[Event]:
    """By what their clocks say; a line without one stays behind the line of its source that it follows."""
    latest: dict[Source, float] = {}

    def moment(event: Event) -> float:
        later_s = distance_s(event.evidence, root.evidence) if _same_clock(event, root) else None
        latest[event.source] = latest.get(event.source, 0.0) if later_s is None else later_s
        return latest[event.source]

    return sorted(events, key=moment)


def _stood_before(event: Event, root: Event) -> bool:
    """Another line said it well before the root: it follows from something else."""
    later_s = distance_s(event.evidence, root.evidence) if _same_clock(event, root) else None
    return later_s is not None and later_s < -CLOCK_SLACK_S


def _same_clock(event: Event, root: Event) -> bool:
    return bool(event.evidence.data.get("zone_unknown")) is bool(root.evidence.data.get("zone_unknown"))


def _role(event: Event, root: Event) -> Role | None:
    if event is root or (event.evidence is root.evidence and event.cause is root.cause):
        return Role.EVENT if root.cause is not None and root.cause.is_ok else Role.ROOT
    if event.evidence is root.evidence or event.kind is Kind.MILESTONE:
        return None
    if event.is_suspect:
        why = explains(root, event)
        if why is None:
            return None
        return Role.SAME_EVENT if event.cause is root.cause else Role.CONSEQUENCE
    if event.kind is Kind.CONSEQUENCE:
        return Role.CONSEQUENCE
    if event.kind is Kind.SYMPTOM:
        return Role.SYMPTOM
    return Role.EVENT if event.kind is Kind.BENIGN and root.cause is not None and root.cause.is_ok else None


def _unknown(case: Case, verdict: Verdict) -> Diagnosis:
    """Nothing carries a cause: say so, keep the line that comes nearest."""
    nearest = nearest_line(case.events)
    unread = what_was_given(case.evidence) if all(event.source in _UNTOLD for event in case.events) else None
    if unread is not None:
        return _nothing_recognised(unread, case)
    raised = nearest is not None and nearest.name in _RAISED
    state = "ended" if case.dead else "raised an exception" if raised else "shows neither health nor a fault"
    engine = f"The engine ({case.engine})" if case.engine else "The engine"
    said = f"; the nearest line is {nearest.text[:160]!r}" if nearest is not None else ""
    return Diagnosis(
        cause=Cause.UNKNOWN,
        confidence=Confidence.LOW,
        sentence=f"{engine} {state} and no line of the evidence carries a cause{said}.",
        root=None if nearest is None else cite(nearest),
        chain=tuple(ChainLink(Role.SYMPTOM, event.pattern_id or event.name, cite(event)) for event in _informative(case.events))[
            :CHAIN_LINKS
        ],
        refuted=refuted(None, verdict, case),
        remedies=(
            "Restart once on the same setting and keep this evidence.",
            "Give more evidence: the kernel log, systemd's log and the exit code (--kernel-log, --systemd-log, --exit).",
        ),
    )


def _nothing_recognised(given: str, case: Case) -> Diagnosis:
    """Another file may have been meant."""
    known = f"; of the end itself only this is known: {case.exit.evidence.text}" if case.exit.evidence and case.exit.evidence.text else ""
    return Diagnosis(
        cause=Cause.UNKNOWN,
        confidence=Confidence.LOW,
        sentence=f"Nothing of an engine was recognised: {given}{known}.",
        root=None,
        remedies=(
            "Give what the engine printed (stdout and stderr, or `journalctl -u UNIT -o json`), from its start to its end.",
            "Add the kernel log, systemd's log and the exit code: --kernel-log, --systemd-log, --exit.",
        ),
    )


def nearest_line(events: Sequence[Event]) -> Event | None:
    """An exception's own line, else the first consequence."""
    return next((event for event in events if event.name in _RAISED), None) or next(iter(_informative(events)), None)


def _informative(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind in (Kind.CONSEQUENCE, Kind.SYMPTOM) and event.text]
