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


@dataclass(frozen=True, slots=True)
class Tried:
    """How often a rung failed for a cause since the engine was last stable."""

    cause: Cause
    rung: int
    times: int


@dataclass(frozen=True, slots=True)
class History:
    """Counters since the engine was last stable, and the rung it is on.

    Attributes:
        rung: index on the ladder of the next start.
        start_failures: failed starts in a row; a proved engine resets it.
        failures: failures in a row of either phase; sets the back-off.
        climbed_from: the safer rung that was left for the present one by itself, while that is on probation.
        failed_climbs: each one doubles the wait before the next climb.
        wants: the rung that was left only because it needs more cards than can be used now.
        runtime: the environment of the last engine that proved itself; empty where it has no name.
    """

    rung: int = 0
    start_failures: int = 0
    failures: int = 0
    tried: tuple[Tried, ...] = ()
    climbed_from: int | None = None
    failed_climbs: int = 0
    wants: int | None = None
    runtime: str = ""

    def times(self, cause: Cause, rung: int) -> int:
        """How often this rung failed for this cause."""
        return next((entry.times for entry in self.tried if entry.cause is cause and entry.rung == rung), 0)

    def with_failure(self, cause: Cause, phase: Phase, *, refused: bool = False) -> History:
        """One more failure of the present rung. A start whose proof was refused was a good one."""
        others = tuple(entry for entry in self.tried if not (entry.cause is cause and entry.rung == self.rung))
        return dataclasses.replace(
            self,
            start_failures=self.start_failures + (phase is Phase.START and not refused),
            failures=self.failures + 1,
            tried=(*others, Tried(cause, self.rung, self.times(cause, self.rung) + 1)),
        )

    def proved(self, runtime: str = "") -> History:
        """It started, in this environment: the budget of start failures is whole again. The others need a stable time."""
        return dataclasses.replace(self, start_failures=0, runtime=runtime)

    def fitted(self, rungs: int) -> History:
        """For a ladder of so many rungs, which may be shorter than the one it was written for."""
        climbed_from = self.climbed_from if self.climbed_from is not None and self.climbed_from < rungs else None
        wants = self.wants if self.wants is not None and self.wants < rungs else None
        return dataclasses.replace(self, rung=min(self.rung, rungs - 1), climbed_from=climbed_from, wants=wants)

    def on_cards(self, cards: int, ladder: tuple[Rung, ...]) -> History | None:
        """With so many cards: back on the rung that wanted them, or down to the first one that fits; None where none does."""
        if self.wants is not None and ladder[self.wants].tensor_parallel <= cards:
            return dataclasses.replace(self, rung=self.wants, wants=None)
        fitting = next((index for index in range(self.rung, len(ladder)) if ladder[index].tensor_parallel <= cards), None)
        if fitting is None or fitting == self.rung:
            return self if fitting is not None else None
        return dataclasses.replace(self, rung=fitting, wants=self.rung if self.wants is None else self.wants)

    def climbed(self) -> History:
        """One rung up, on probation."""
        return dataclasses.replace(self, rung=self.rung - 1, climbed_from=self.rung)

    def fallen_back(self) -> History:
        """The climb did not hold: back to where it came from."""
        rung = self.climbed_from if self.climbed_from is not None else self.rung
        return dataclasses.replace(self, rung=rung, climbed_from=None, failed_climbs=self.failed_climbs + 1)

    def stable(self) -> History:
        """A stable time has passed: nothing is held against any rung, and a climb has held."""
        failed_climbs = 0 if self.climbed_from is not None else self.failed_climbs
        return History(rung=self.rung, failed_climbs=failed_climbs, wants=self.wants, runtime=self.runtime)

    def forgiven(self) -> History:
        """A person asked for a new try."""
        return History(rung=self.rung, wants=self.wants, runtime=self.runtime)
