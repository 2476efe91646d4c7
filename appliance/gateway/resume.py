"""What becomes of a request whose engine died. Pure.

Four ways on, by what the client has and what the next engine can: the same body again; the token ids so far, behind
which an engine that continues by ids goes on; the text so far as a message to be finished; or the same body again with what
was sent compared and swallowed.

And who is to blame. A request that was with two engines in a row when they died, and got no further in the second, is
suspected: it is tried alone, and if an engine dies with it alone, it is quarantined. What got further is not suspected:
a poison cannot get past the place where it kills. And where engines die all the time, without this request as well, one
death proves nothing: it is tried alone again until chance explains its deaths in one case out of a thousand.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.core.launch import ContinuesBy
from appliance.core.requests import Resumability

SUSPECT_AFTER = 2
"""Engines in a row that died while a request got no further; from then on it is tried alone."""
TRIAL_S = 2.0
"""What a trial takes, at least, for the question how likely an engine was to die during it. Not until it died: that would
make every early death look like proof."""
PROOF = 1e-3
"""A request is guilty when its engines' deaths, alone with it, are less likely than this to have come by chance."""
LIVES_MAX = 100
"""However far it gets each time: a request that takes more lives than this is not worth it."""


class Verdict(enum.Enum):
    """What to do."""

    AGAIN = "again"
    """Wait for an engine and give it to that one."""
    ALONE = "alone"
    """The same, but while nobody else is with the engine."""
    QUARANTINE = "quarantine"
    """It kills engines."""
    FAIL_SENT = "fail_sent"
    """Part of the answer is with the client and cannot be continued."""
    FAIL_ATTEMPTS = "fail_attempts"
    """It has lost as many engines as it may."""
    FAIL_WAITED = "fail_waited"
    """It has waited as long as it may."""


class Way(enum.Enum):
    """How it is given to an engine."""

    PLAIN = "plain"
    """The body as it came."""
    IDS = "ids"
    """With what the engines so far have noted, and a request for notes."""
    MESSAGE = "message"
    """With the text that the client has, as the beginning of the answer's message."""
    REPLAY = "replay"
    """The body as it came; of the answer, what the client has is compared and swallowed."""


class LifeName(NamedTuple):
    """Which engine life: each of several engines counts its own generations."""

    generation: int
    replica: int = 0


@dataclass(slots=True)
class Losses:
    """The engines that one request has lost.

    Attributes:
        lives: all of them.
        fruitless: those in a row, up to now, since it last got further; died or not.
        crashes: of these, the lives that died. (One in which it did get further, and died later, is the first.)
        chances: for each of these that died while it had nothing else, how likely it was to die then in any case.
    """

    lives: int = 0
    fruitless: int = 0
    crashes: list[LifeName] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def got_further(self) -> None:
        """Whatever the engines before died of, it was not that this request could not get past that place."""
        self.fruitless = 0
        self.acquit()

    def acquit(self) -> None:
        """The crashes had another cause."""
        self.crashes.clear()
        self.chances.clear()

    def add(self, life: LifeName) -> None:
        """One more; it has died, as far as we know."""
        self.lives += 1
        self.fruitless += 1
        self.crashes.append(life)

    def survived(self, life: LifeName) -> None:
        """This one did not die after all: a connection broke."""
        self.crashes = [crash for crash in self.crashes if crash != life]

    @property
    def suspected(self) -> bool:
        """It is to be tried alone."""
        return len(self.crashes) >= SUSPECT_AFTER

    @property
    def proved(self) -> bool:
        """It kills engines."""
        return self.suspected and bool(self.chances) and math.prod(self.chances) < PROOF


@dataclass(frozen=True, slots=True)
class Loss:
    """The facts at the moment of a loss.

    Attributes:
        resumability: of the request.
        waited_s: since its first loss.
    """

    resumability: Resumability
    losses: Losses
    waited_s: float


def after_loss(loss: Loss, *, max_attempts: int, max_wait_s: float) -> Verdict:
    """`max_attempts` losses in a row without getting any further are forgiven; the next one is not, unless it may well be chance."""
    losses = loss.losses
    if losses.proved:
        return Verdict.QUARANTINE
    if loss.resumability is Resumability.FAIL:
        return Verdict.FAIL_SENT
    if losses.fruitless - len(losses.chances) > max_attempts or losses.lives > LIVES_MAX:
        return Verdict.FAIL_ATTEMPTS
    if loss.waited_s > max_wait_s:
        return Verdict.FAIL_WAITED
    return Verdict.ALONE if losses.suspected else Verdict.AGAIN


@dataclass(frozen=True, slots=True)
class Death:
    """Of an engine that was not asked to end.

    Attributes:
        served_s: how long it had served.
    """

    life: LifeName
    served_s: float


def chance_of_death(deaths: Iterable[Death], own: Iterable[LifeName], alone_s: float) -> float:
    """How likely an engine is to die during a trial by what it also dies of without this request.

    Args:
        deaths: the last ones.
        own: lives that ended with this request; those say nothing about the others.
    """
    known = list(deaths)
    others = len([death for death in known if death.life not in set(own)])
    served_s = sum(death.served_s for death in known)
    return 1 - math.exp(-others / served_s * max(alone_s, TRIAL_S)) if others and served_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an answer is, for the choice of a way.

    Attributes:
        sent: the client has some of it.
        noted: engines have noted enough to go on by ids.
        comparable: a second run could be measured against what was sent.
        generates: its endpoint is one whose answers grow token by token.
        plain: what was sent is a text and nothing else.
    """

    sent: bool
    noted: bool
    comparable: bool
    generates: bool
    plain: bool = False


def way_on(progress: Progress, engine: ContinuesBy) -> Way | None:
    """The way to give it to such an engine; None where there is none."""
    by_ids = engine is ContinuesBy.IDS and progress.generates
    if not progress.sent:
        return Way.IDS if by_ids else Way.PLAIN
    if by_ids and progress.noted:
        return Way.IDS
    if engine is ContinuesBy.MESSAGE and progress.plain:
        return Way.MESSAGE
    return Way.REPLAY if progress.comparable else None
