"""When an engine is started with instruments: after the second unexplained crash of one signature, until they have caught something
or an hour has passed in which nothing happened. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.recurrence import signature

TWICE = 2
MOST_KEPT = 50
UNEXPLAINED = frozenset({Cause.UNKNOWN, Cause.CUDA_ILLEGAL_ACCESS, Cause.CUDA_LAUNCH_FAILURE, Cause.ENGINE_RPC_TIMEOUT, Cause.NCCL_TIMEOUT})
"""Verdicts that say what happened and not whose doing it was: CUDA tells of a bad access wherever it is asked next, and a time-out says
who waited. A stack of the moment itself would tell."""


@dataclass(frozen=True, slots=True)
class Suspicions:
    """What has been seen of unexplained crashes.

    Attributes:
        seen: signature and how often, the one that was seen last at the end.
        wanted: the signature that the instruments are switched on for; empty while they are off.
        caught: signatures of which something was caught: looking once more would show the same.
    """

    seen: tuple[tuple[str, int], ...] = ()
    wanted: str = ""
    caught: tuple[str, ...] = ()

    def after_crash(self, diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> Suspicions:
        """One more; the instruments go on at the second of its kind."""
        sign = sign_of(diagnosis, evidence)
        if sign is None:
            return self
        times = dict(self.seen).get(sign, 0) + 1
        seen = (*((other, count) for other, count in self.seen if other != sign), (sign, times))[-MOST_KEPT:]
        wanted = self.wanted or (sign if times >= TWICE and sign not in self.caught else "")
        return dataclasses.replace(self, seen=seen, wanted=wanted)

    def after_catch(self) -> Suspicions:
        """They have caught something: off, and not on again for that."""
        return dataclasses.replace(self, wanted="", caught=(*self.caught, self.wanted)[-MOST_KEPT:]) if self.wanted else self

    def after_stable_time(self) -> Suspicions:
        """Nothing happened for so long: off, and two more of a kind are needed."""
        return Suspicions(caught=self.caught)


def sign_of(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> str | None:
    """What makes two unexplained crashes the same; None where this one has an owner: a cause of another kind, or a stack of its moment."""
    if diagnosis.cause not in UNEXPLAINED or any(item.source in (Source.STACK, Source.CORE_DUMP) for item in evidence):
        return None
    found = signature(diagnosis, evidence)
    if found is not None:
        return found.value
    ends = [item.text for item in evidence if item.source is Source.EXIT]
    return f"{diagnosis.cause.label} {ends[-1] if ends else ''}".strip()
