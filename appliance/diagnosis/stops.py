"""Stops that somebody asked systemd for. `Stopping X...` is printed for nothing else; `Stopped X.` also whenever a service that failed is
started anew, and then it is nobody's wish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.causality import ZONE_UNKNOWN_S, distance_s
from appliance.diagnosis.events import Event

MARKS = ("unit_started", "unit_down", "unit_stopping", "unit_stopped")
SLACK_S = 2.0
"""systemd and the engine write their lines down at their own pace."""
_ENGINES = re.compile(
    r"vllm|sglang|ollama|llama|text-generation|\btgi\b|\bllm|aphrodite|lmdeploy|tabby|kobold|triton|applianced?\b|inference|"
    r"(?<!container )engine|\bray\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop that was asked for, until the next start."""

    line: Event
    until: Event | None = None

    def covers(self, event: Event) -> bool:
        """Whether what happened belongs to it; where neither order nor clock can tell, it may."""
        return _after(event, self.line) is not False and (self.until is None or _after(self.until, event) is not False)


def of_engine(text: str) -> bool:
    """Whether a unit's name or description is one that engines have."""
    return _ENGINES.search(text) is not None


def stops_of(events: Sequence[Event]) -> tuple[Stop, ...]:
    """Those of systemd's log, in order; where it speaks of engines by name, only theirs."""
    marks = [event for event in events if event.name in MARKS and event.source is Source.SYSTEMD]
    named = [event for event in marks if of_engine(event.text)]
    return tuple(_stops(named or marks))


def _stops(marks: Sequence[Event]) -> Iterator[Stop]:
    asked: Stop | None = None
    down = False
    for mark in marks:
        if mark.name == "unit_started":
            if asked is not None:
                yield replace(asked, until=mark)
            asked, down = None, False
        elif mark.name == "unit_down":
            down = True
        elif asked is None and not down:
            asked = Stop(mark)
    if asked is not None:
        yield asked


def _after(one: Event, other: Event) -> bool | None:
    """Whether `one` happened at the time of `other` or later; None where nothing can be compared."""
    if one.source is other.source:
        return one.order >= other.order
    apart_s = distance_s(one.evidence, other.evidence)
    if apart_s is None or (_zone(one.evidence) is not _zone(other.evidence) and abs(apart_s) < ZONE_UNKNOWN_S):
        return None
    return apart_s >= -SLACK_S


def _zone(evidence: Evidence) -> bool:
    return bool(evidence.data.get("zone_unknown"))
