"""What is remembered of failures, over restarts of applianced and reboots. The policy's only memory."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.plan import Rung


class Phase(enum.Enum):
    """When an engine life ended. Start failures and failures while serving have separate budgets."""

    START = "start"
    SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Failure:
    """A crash that is being handled.

    Attributes:
        time_s: of the first fatal evidence, on the monotonic clock.
        first_evidence: its words.
        uptime_s: how long it had served; 0 for a start that failed.
        outside: somebody did it to the engine, so that no rung is to blame whatever the cause is called.
        worst_case: it happened during the longest prompt of a proof run.
        refused: nothing broke: the proof run was not passed.
        known: the verdict, where it needs no evidence.
        runtime: the environment that it ran in.
        offers: the rungs that a refused proof named as safer ones; None: what stands below on the ladder.
    """

    time_s: float
    generation: int
    phase: Phase
    rung: int
    first_evidence: str
    uptime_s: float = 0.0
    outside: bool = False
    worst_case: bool = False
    refused: bool = False
    known: Diagnosis | None = None
    runtime: str = ""
    offers: tuple[Rung, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """How often a setting failed for a cause since the engine was last stable.

    Attributes:
        setting: `Rung.setting`, not a place on the ladder: what stands at a place changes with what is offered there.
        times: 0 where a stable time has passed since. It is remembered all the same: nothing that was left is offered again further down.
    """

    cause: Cause
    setting: Rung
    times: int


@dataclass(frozen=True, slots=True)
class History:
    """Counters since the engine was last stable, the rung it is on, and how it came there.

    Attributes:
        rung: index on the ladder of the next start.
        start_failures: failed starts in a row; a proved engine resets it.
        failures: failures in a row of either phase; sets the back-off.
        climbed_from: the safer rung that was left for the present one by itself, while that is on probation.
        failed_climbs: each one doubles the wait before the next climb.
        wants: the rung that was left only because it needs more cards than can be used now.
        runtime: the environment of the last engine that proved itself; empty where it has no name.
        below: the rungs under the configured one, without their plans: those that were taken, and what was offered below the last of them.
            Empty while none has been taken: then what stands below is a forecast, made anew whenever more is known.
    """

    rung: int = 0
    start_failures: int = 0
    failures: int = 0
    tried: tuple[Tried, ...] = ()
    climbed_from: int | None = None
    failed_climbs: int = 0
    wants: int | None = None
    runtime: str = ""
    below: tuple[Rung, ...] = ()

    def times(self, cause: Cause, rung: Rung) -> int:
        """How often this setting failed for this cause."""
        setting = rung.setting
        return next((entry.times for entry in self.tried if entry.cause is cause and entry.setting == setting), 0)

    def with_failure(self, cause: Cause, phase: Phase, rung: Rung, *, refused: bool = False, outside: bool = False) -> History:
        """One more failure of this rung. A start whose proof was refused was a good one; what came from outside is held against none."""
        setting = rung.setting
        others = tuple(entry for entry in self.tried if not (entry.cause is cause and entry.setting == setting))
        return dataclasses.replace(
            self,
            start_failures=self.start_failures + (phase is Phase.START and not refused),
            failures=self.failures + 1,
            tried=self.tried if outside else (*others, Tried(cause, setting, self.times(cause, rung) + 1)),
        )

    def proved(self, runtime: str = "") -> History:
        """It started, in this environment: the budget of start failures is whole again. The others need a stable time."""
        return dataclasses.replace(self, start_failures=0, runtime=runtime)

    def fitted(self, rungs: int) -> History:
        """For a ladder of so many rungs, which may be shorter than the one it was written for: a forecast that was made anew.

        Rungs that were taken are part of the history (`below`), so it is only ever about one that none was taken of. Under another
        configuration nothing is fitted: that is another story, which begins on rung 0 (`anew`).
        """
        climbed_from = self.climbed_from if self.climbed_from is not None and self.climbed_from < rungs else None
        wants = self.wants if self.wants is not None and self.wants < rungs else None
        return dataclasses.replace(self, rung=min(self.rung, rungs - 1), climbed_from=climbed_from, wants=wants)

    def on_cards(self, cards: int, ladder: tuple[Rung, ...]) -> History | None:
        """With so many cards: back on the rung that wanted them, or down to the first one that fits; None where none does."""
        if self.wants is not None and ladder[self.wants].tensor_parallel <= cards:
            return dataclasses.replace(self, rung=self.wants, wants=None, climbed_from=None)
        fitting = next((index for index in range(self.rung, len(ladder)) if ladder[index].tensor_parallel <= cards), None)
        if fitting is None or fitting == self.rung:
            return self if fitting is not None else None
        wants = self.rung if self.wants is None else self.wants
        return dataclasses.replace(self, rung=fitting, wants=wants, climbed_from=None)

    def climbed(self) -> History:
        """One rung up, on probation."""
        return dataclasses.replace(self, rung=self.rung - 1, climbed_from=self.rung)

    def fallen_back(self) -> History:
        """The climb did not hold: back to where it came from."""
        rung = self.climbed_from if self.climbed_from is not None else self.rung
        return dataclasses.replace(self, rung=rung, climbed_from=None, failed_climbs=self.failed_climbs + 1)

    def standing_on(self, ladder: tuple[Rung, ...]) -> History:
        """With the rungs of the ladder that it goes by, once a rung below the configured one matters."""
        if not self.rung and not self.below and self.wants is None:
            return self
        return dataclasses.replace(self, below=tuple(dataclasses.replace(rung, plan=None) for rung in ladder[1:]))

    def stable(self) -> History:
        """A stable time has passed: nothing is held against any rung, and a climb has held. On rung 0 the story is over."""
        if self.rung == 0 and self.wants is None:
            return self.anew()
        failed_climbs = 0 if self.climbed_from is not None else self.failed_climbs
        forgiven = tuple(dataclasses.replace(entry, times=0) for entry in self.tried)
        return dataclasses.replace(self.forgiven(), failed_climbs=failed_climbs, tried=forgiven)

    def forgiven(self) -> History:
        """A person asked for a new try."""
        return History(rung=self.rung, wants=self.wants, runtime=self.runtime, below=self.below)

    def anew(self) -> History:
        """On rung 0, with nothing known of any rung: another configuration, or a configured rung that has held."""
        return History(runtime=self.runtime)
