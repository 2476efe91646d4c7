"""The verdict: what `appliance.diagnosis` returns and everybody else prints, stores or acts on."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from appliance.core.causes import Cause
from appliance.core.evidence import Source


class Role(enum.Enum):
    """What a line is in the chain from the root to what people saw."""

    ROOT = "root"
    SAME_EVENT = "same_event"
    """The root again, in other words or from another source."""
    EVENT = "event"
    """It happened, it is neither cause nor consequence (a milestone, a request)."""
    SYMPTOM = "symptom"
    CONSEQUENCE = "consequence"


class Confidence(enum.Enum):
    """HIGH: the root line is explicit. MEDIUM: it follows from several lines. LOW: best guess, evidence kept."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Citation:
    """A line of evidence as quoted: source, 1-based line (0 where there are none), text, and its time if known."""

    source: Source
    line: int
    text: str
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One step of the chain: what the line is, and the line."""

    role: Role
    label: str
    citation: Citation


@dataclass(frozen=True, slots=True)
class Refuted:
    """A hypothesis that the evidence suggests and does not carry, with the reason."""

    cause: Cause
    reason: str
    citation: Citation | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Root cause, chain, refuted suspects and remedies.

    Attributes:
        cause: UNKNOWN is a first-class answer.
        sentence: one sentence for the owner, numbers included.
        root: the line the verdict stands on; None only for UNKNOWN and OK_NORMAL without any line.
        remedies: what the owner should do, most likely first.
        safer_config: engine-neutral key → new value or move ("mem_fraction": "0.95 -> 0.93"), empty where
            no setting helps.
        numbers: what was asked for, free, in use..., bytes or seconds by name (`asked_bytes`, `free_bytes`).
        doubts: what speaks against being sure; empty where `confidence` is HIGH.
    """

    cause: Cause
    confidence: Confidence
    sentence: str
    root: Citation | None
    chain: tuple[ChainLink, ...] = ()
    refuted: tuple[Refuted, ...] = ()
    remedies: tuple[str, ...] = ()
    safer_config: tuple[tuple[str, str], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def crashed(self) -> bool:
        """Whether something is wrong (exit code 1 of `diagnose`); UNKNOWN included."""
        return not self.cause.is_ok
