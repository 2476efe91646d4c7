"""Who is served before whom: by priority, then by arrival, and nobody for ever.

    rank = (overdue first, priority, arrival); the lowest is the first

A lower priority goes first, as vLLM has it. A sequence that younger ones went past MOST_OVERTAKEN times is overdue: it goes before all
that are not, and among the overdue the oldest is the first.

The bound that follows: while a request waits, or its prompt is computed, at most MOST_OVERTAKEN younger ones of lower rank go on before
it, whatever comes meanwhile; beside them only older ones, and younger ones that gave way earlier and hold their prompts' room
(scheduler.py), of which there is no new one meanwhile. Once overdue it gives way to older overdue ones alone, and the oldest of these to
nobody. With one priority for all nobody is ever overtaken, and the order is that of arrival.

Pure: over sequences, without clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.sequence import Sequence

MOST_OVERTAKEN = 32
"""So a flood of urgent requests leaves at least a 33rd of the admissions to others."""

Rank = tuple[bool, int, int]


def rank(sequence: Sequence) -> Rank:
    """Its place; no two living sequences have the same."""
    overdue = sequence.overtaken >= MOST_OVERTAKEN
    return (not overdue, 0 if overdue else sequence.request.priority, sequence.arrival)


def note_admission(admitted: Sequence, others: Iterable[Sequence]) -> None:
    """It goes on now, before those others that are not decoding: who is older was overtaken."""
    for other in others:
        if other.arrival < admitted.arrival and rank(admitted) < rank(other):
            other.overtaken += 1


def note_preemption(preempted: Sequence, others: Iterable[Sequence]) -> None:
    """It gives way, and these others go on: once more overtaken, if a younger one is among them."""
    if any(other.arrival > preempted.arrival for other in others):
        preempted.overtaken += 1
