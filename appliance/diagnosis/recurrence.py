"""The same crash again: signatures of incidents, and what crashes have in common against healthy traffic."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source

_MASKS = (
    (re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"), "<hex>"),
    (re.compile(r"(?:/[\w.@+-]+){2,}"), "<path>"),
    (re.compile(r"'[^']{0,400}'|\"[^\"]{0,400}\""), "<quoted>"),
    (re.compile(r"\d+(?:\.\d+)?"), "#"),
)
_FRAME = re.compile(r'File ".*?([^/\\"]+)", line \d+, in (\w+)|^#\d+ +0x[0-9a-f]+ in (\w+)')
_XID = re.compile(r"Xid \([^)]*\): (\d+)")
FRAMES = 3
FRAMES_WITHIN = 80


@dataclass(frozen=True, slots=True)
class Signature:
    """What makes two incidents the same crash: equal `value`, from equal parts."""

    value: str
    parts: tuple[str, ...]


def signature(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> Signature | None:
    """The signature of an incident: cause, Xid, masked root line, the frames nearest to it. None where nothing is sure enough."""
    if diagnosis.cause is Cause.UNKNOWN and diagnosis.root is None:
        return None
    parts = [diagnosis.cause.label]
    if diagnosis.root is not None:
        number = _XID.search(diagnosis.root.text)
        parts.append(f"xid {number[1]}" if number else mask(diagnosis.root.text))
        parts += _frames(diagnosis, evidence)
    return Signature(hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:12], tuple(parts))


def mask(line: str) -> str:
    """A line without what differs between two crashes of one kind: numbers, addresses, paths, quoted text, its prefix."""
    line = re.sub(r"^.*?(?=[A-Za-z_.]*(?:Error|Exception|Fatal|CUDA|Assertion))", "", line, count=1) or line
    for pattern, word in _MASKS:
        line = pattern.sub(word, line)
    return line[:200]


def _frames(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> list[str]:
    """The last frames above the root: file and function, no line numbers (they move with every release)."""
    if diagnosis.root is None:
        return []
    texts = [item.text for item in evidence if item.source in (Source.ENGINE_LOG, Source.STACK, Source.CORE_DUMP)]
    end = next((index for index, text in enumerate(texts) if text == diagnosis.root.text), len(texts))
    found = [match for text in texts[max(0, end - FRAMES_WITHIN) : end] if (match := _FRAME.search(text)) is not None]
    return [f"{match[1]}:{match[2]}" if match[2] else str(match[3]) for match in found[-FRAMES:]]


Features = Mapping[str, float | str]
"""What is known of one request or crash: prompt length, batch size, fill of the context, card, versions, time since start."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Something that crashes share and healthy traffic does not.

    Attributes:
        lift: share among crashes over share among healthy traffic (one is added to the healthy count: never infinite).
        chance: how likely so many crashes share it by accident, if crashes were drawn from healthy traffic.
    """

    feature: str
    value: str
    crashes_with: int
    crashes: int
    healthy_with: int
    healthy: int
    lift: float
    chance: float

    def sentence(self) -> str:
        """For the owner."""
        return (
            f"{self.crashes_with} of {self.crashes} crashes had {self.feature} {self.value}, against {self.healthy_with} of "
            f"{self.healthy} healthy ones ({self.lift:.0f} times as often)"
        )


FEWEST_CRASHES = 3
MOST_CHANCE = 0.01
LEAST_SHARE = 0.6


def patterns(crashes: Sequence[Features], healthy: Sequence[Features]) -> tuple[Pattern, ...]:
    """What at least 60 % of three or more crashes share and chance does not explain, the strongest first.

    Values are compared as they are (127 tokens, batch 37, a card's id) and, for numbers, as "at least" and "at most" the
    crashes' own range; so a length that only crashes have is seen at the third crash.
    """
    if len(crashes) < FEWEST_CRASHES or not healthy:
        return ()
    found = [pattern for test in _tests(crashes) if (pattern := _judge(test, crashes, healthy)) is not None]
    return tuple(sorted(found, key=lambda pattern: (pattern.chance, -pattern.lift, "=" not in pattern.value)))


@dataclass(frozen=True, slots=True)
class _Test:
    feature: str
    value: str
    low: float | None = None
    high: float | None = None

    def holds(self, row: Features) -> bool:
        known = row.get(self.feature)
        if known is None:
            return False
        if self.low is None and self.high is None:
            return f"= {_shown(known)}" == self.value
        if isinstance(known, str):
            return False
        return (self.low is None or known >= self.low) and (self.high is None or known <= self.high)


def _tests(crashes: Sequence[Features]) -> Iterator[_Test]:
    for feature in sorted({name for row in crashes for name in row}):
        known = [row[feature] for row in crashes if feature in row]
        for value in dict.fromkeys(map(_shown, known)):
            yield _Test(feature, f"= {value}")
        numbers = [value for value in known if not isinstance(value, str)]
        if len(numbers) >= FEWEST_CRASHES:
            yield _Test(feature, f">= {_shown(min(numbers))}", low=min(numbers))
            yield _Test(feature, f"<= {_shown(max(numbers))}", high=max(numbers))


def _judge(test: _Test, crashes: Sequence[Features], healthy: Sequence[Features]) -> Pattern | None:
    bad, good = sum(map(test.holds, crashes)), sum(map(test.holds, healthy))
    if bad < FEWEST_CRASHES or bad < LEAST_SHARE * len(crashes):
        return None
    share = (good + 1) / (len(healthy) + 1)
    chance = _at_least(bad, len(crashes), min(1.0, share))
    if chance > MOST_CHANCE:
        return None
    return Pattern(test.feature, test.value, bad, len(crashes), good, len(healthy), bad / len(crashes) / share, chance)


def _at_least(hits: int, tries: int, share: float) -> float:
    """Probability of at least so many hits in so many tries."""
    total, term = 0.0, (1 - share) ** tries if share < 1 else 0.0
    if share >= 1:
        return 1.0
    for count in range(tries + 1):
        if count >= hits:
            total += term
        term *= (tries - count) / (count + 1) * share / (1 - share)
    return min(1.0, total)


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value == int(value) else f"{value:g}"
