"""Lengths of prompts that go with crashes: what the gateway is advised to refuse for a while. Pure.

A row is a crash: the lengths that were in flight. It is measured against as many healthy prompts at a time as a crash had
with it, so that a busy engine, which always has some prompt of 127 tokens, does not look guilty. The same body in a second
crash says nothing new about its length; such a crash is no row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.diagnosis.recurrence import Features, Pattern, patterns

WINDOW_S = 24 * 3600.0
"""Older crashes are not counted: a length that is refused has none any more, and is tried again after a day."""
HEALTHY_MAX = 500
"""Lengths of answered prompts that the gateway sends along."""
_FEATURE = "prompt_tokens"
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FusedLength:
    """One length, and why, in a sentence."""

    tokens: int
    why: str


def crash_lengths(incidents: Sequence[Document], healthy: Sequence[int], now_s: float) -> tuple[FusedLength, ...]:
    """Of incidents in any order; `healthy`: exact lengths of prompts that were answered lately."""
    recent = sorted((one for one in incidents if now_s - one["time_s"] <= WINDOW_S), key=lambda one: float(one["time_s"]))
    crashes = _rows(recent)
    together = max(map(len, crashes), default=0)
    groups = [healthy[at : at + together] for at in range(0, len(healthy), together)] if together else []
    found = []
    for tokens, count in Counter(tokens for crash in crashes for tokens in set(crash)).items():
        if count < 2:
            continue
        rows: list[Features] = [{_FEATURE: tokens} if tokens in crash else {} for crash in crashes]
        pattern = next(iter(patterns(rows, [{_FEATURE: tokens} if tokens in group else {} for group in groups])), None)
        if pattern is not None:
            found.append(FusedLength(tokens, _why(tokens, pattern)))
    return tuple(sorted(found, key=lambda one: one.tokens))


def with_lengths(incident: Document, known: Mapping[tuple[int, str], int | None]) -> list[Document] | None:
    """Its requests with the lengths that have been counted since, by generation and request; None: none of them is among these."""
    places = [(incident["generation"], one["request_id"]) for one in incident["inflight"]]
    if not any(place in known for place in places):
        return None
    return [{**one, _FEATURE: one[_FEATURE] or known.get(place)} for one, place in zip(incident["inflight"], places, strict=True)]


def _rows(oldest_first: Sequence[Document]) -> list[list[int]]:
    seen: set[str] = set()
    rows = []
    for incident in oldest_first:
        fresh = [one for one in incident["inflight"] if one[_FEATURE] is not None and one["fingerprint"] not in seen]
        seen |= {one["fingerprint"] for one in fresh}
        if fresh:
            rows.append([one[_FEATURE] for one in fresh])
    return rows


def _why(tokens: int, pattern: Pattern) -> str:
    return (
        f"{pattern.crashes_with} of {pattern.crashes} crashes of the last day met a prompt of {tokens} tokens, "
        f"{pattern.healthy_with} of {pattern.healthy} as large groups of answered ones had one"
    )
