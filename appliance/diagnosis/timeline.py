"""From evidence to events: matching, phases, folding of repeats, and the engine life that the verdict is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.catalogue import Catalogue
from appliance.diagnosis.events import MILESTONES, Event, Phase, event_of
from appliance.diagnosis.pattern import Kind

FOLD_WITHIN_S = 660.0
"""Repeats of one event further apart than this are two events (a kernel log of several days)."""

ENGINE_SOURCES = frozenset({Source.ENGINE_LOG, Source.STACK})


def events_of(evidence: Iterable[tuple[int, Evidence]], catalogue: Catalogue, translate: Callable[[Event], Event]) -> list[Event]:
    """Every event of the evidence in order, each with the phase the engine was in.

    Evidence comes with its position among all that was given. `translate` gives meaning to numbered events (an Xid)
    before anything else looks at them.
    """
    events: list[Event] = []
    phase = Phase.UNKNOWN
    for order, item in evidence:
        of_engine = item.source in ENGINE_SOURCES
        for pattern, fields in catalogue.matches(item.text, item.source):
            if of_engine:
                phase = MILESTONES.get(pattern.event, Phase.UNKNOWN) or phase
            events.append(translate(event_of(pattern, item, order, fields, phase)))
    return events


def fold(events: Sequence[Event]) -> list[Event]:
    """Repeats of the same event from the same source become one with a count: the first of each burst.

    Milestones are left alone: the last of them before a fault is what counts.
    """
    folded: list[Event] = []
    counts: dict[int, int] = {}
    latest: dict[tuple[object, ...], tuple[int, float | None]] = {}
    for event in events:
        if event.kind is Kind.MILESTONE:
            folded.append(event)
            continue
        key = (
            event.name,
            id(event.cause),  # members of an enumeration are one of each, and their own hash is slow
            id(event.source),
            event.pattern_id,
            event.fields.get("code"),
            event.fields.get("bdf"),
            event.fields.get("pid") if event.source is Source.KERNEL_LOG else None,  # it may be the engine's, and the last one's not
            event.fields.get("unit") if event.source is Source.SYSTEMD else None,  # as a slice's is not
            event.phase.serving,
        )
        known = latest.get(key)
        now_s = event.evidence.time_s
        if known is not None and not _apart(known[1], now_s):
            index = known[0]
            counts[index] = counts.get(index, 1) + 1
            if _names_the_exception(event.text, folded[index].text):
                folded[index] = replace(folded[index], evidence=event.evidence)
            latest[key] = (index, now_s)
        else:
            latest[key] = (len(folded), now_s)
            folded.append(event)
    for index, count in counts.items():
        folded[index] = replace(folded[index], count=count)
    return folded


_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): (.{8,})$")
_WARNING = re.compile(r"\w*Warning: |\bWARN(?:ING)?\b|\bW\d{4} ")


def _names_the_exception(text: str, known: str) -> bool:
    """Both lines say the same, and only the later one names the exception, or is more than a warning: the line to quote."""
    match = _EXCEPTION.search(text)
    if match is None or _EXCEPTION.search(known) is not None:
        return False
    return match[1][:200] in known or _WARNING.search(known) is not None


def _apart(before_s: float | None, now_s: float | None) -> bool:
    return before_s is not None and now_s is not None and abs(now_s - before_s) > FOLD_WITHIN_S


def last_life(events: Sequence[Event]) -> list[Event]:
    """The events of the engine life to be judged: the last one in which something went wrong, else the last one.

    Only engine-log events are divided; what other sources say stays, for time decides about it.
    """
    lives = _lives([event for event in events if event.source in ENGINE_SOURCES])
    if len(lives) < 2:
        return list(events)
    failed = [life for life in lives if any(_went_wrong(event) for event in life)]
    chosen = {id(event) for event in _judged(lives, failed)}
    return [event for event in events if event.source not in ENGINE_SOURCES or id(event) in chosen or event.name in TIMELESS]


def _judged(lives: Sequence[list[Event]], failed: Sequence[list[Event]]) -> list[Event]:
    """The last life that failed; the last one where that serves, and all that failed before were starts."""
    served = any(event.phase.serving for event in lives[-1])
    only_starts = not any(event.phase.serving for life in failed for event in life)
    return lives[-1] if not failed or (served and only_starts) else failed[-1]


TIMELESS = ("gpu_size",)
"""What no life changes."""


STARTS = ("starting", "nccl_init")
"""Milestones that only a start passes."""


def _lives(events: Sequence[Event]) -> list[list[Event]]:
    """A new life begins with a milestone of a start after the engine was ready or had failed."""
    lives: list[list[Event]] = [[]]
    seen_past_start = False
    for event in events:
        if event.name in STARTS and seen_past_start:
            lives.append([])
            seen_past_start = False
        seen_past_start = seen_past_start or event.phase.serving or _went_wrong(event)
        lives[-1].append(event)
    return lives


def _went_wrong(event: Event) -> bool:
    """Rules have not spoken yet: whatever may be a cause counts."""
    return event.fatal or event.kind is Kind.CAUSE
