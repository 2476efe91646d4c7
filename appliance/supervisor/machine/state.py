"""All that the reducer knows, what follows from it, and the moves that several of its parts make."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, EngineState, check_move
from appliance.supervisor import events as ev
from appliance.supervisor.history import Failure, History
from appliance.supervisor.settings import MachineSettings

START_GUESS_S = 5.0
"""Retry-After before any start was measured."""

Step = tuple["MachineState", tuple[ev.Effect, ...]]


class Purpose(enum.Enum):
    """What a requested stop of the engine is for."""

    RESTART = "restart"
    PARK = "drain"
    EXIT = "stop"


@dataclass(frozen=True, slots=True)
class MachineState:
    """One value; the only one there is.

    Attributes:
        ladder: the rungs that were taken, and what stands below the last of them (rungs.py); an index is a place on it.
        generation: of the present or the last engine life; 0 before the first.
        alive: a process group of that life may exist.
        uses_gpu: a card carries it, so that the loss of a card is the loss of the engine.
        cards: how many can be used; 0 where none is used.
        limits: what clients may send; set from its first answered probe until it fails or stops.
        sentence: what people read.
        basis: what we last did by ourselves, and why; empty once the engine serves.
        failure: the crash that is being handled, until its verdict is in.
        purpose: set while a requested stop is under way.
        next_rung: where a requested restart goes, if elsewhere.
        worst_case: the longest prompt of a proof run is under way.
        stopping: that stop was begun on the engine (SIGTERM or SIGKILL): its death is no crash from here on.
        leaving: it was told to end by somebody else and finishes its answers; nobody has killed it yet.
        delay_s: the back-off that runs.
        recovering: the incident that ends with the next SERVING, and when it began.
        since_s: when `state` was entered.
        loading_s: when the start was seen to load last; 0 before that.
        start_took_s: how long the last good start took, for Retry-After.
        restarts: engine lives of this applianced beyond the first.
    """

    settings: MachineSettings
    ladder: tuple[Rung, ...]
    history: History = field(default_factory=History)
    state: EngineState = EngineState.WAITING_FOR_GPU
    generation: int = 0
    alive: bool = False
    uses_gpu: bool = False
    cards: int = 0
    spec: LaunchSpec | None = None
    limits: EngineLimits | None = None
    sentence: str = "applianced is starting"
    basis: str = ""
    failure: Failure | None = None
    purpose: Purpose | None = None
    next_rung: int | None = None
    worst_case: bool = False
    stopping: bool = False
    leaving: bool = False
    delay_s: float = 0.0
    recovering: tuple[str, float] | None = None
    incident_id: str | None = None
    since_s: float = 0.0
    spawned_s: float = 0.0
    loading_s: float = 0.0
    start_took_s: float = START_GUESS_S
    restarts: int = 0

    @property
    def rung(self) -> Rung:
        """The rung of this or the next life."""
        return self.ladder[self.history.rung]

    @property
    def answering(self) -> bool:
        """Clients' requests go to the engine."""
        return self.state in ANSWERING

    @property
    def running(self) -> bool:
        """An engine life is under way, of which a failure would be news."""
        return self.answering or self.state in (EngineState.STARTING, EngineState.PROVING, EngineState.DRAINING)


def publication_of(state: MachineState) -> Publication:
    """What the gateway may know."""
    draining = state.state is EngineState.DRAINING and not state.stopping
    reachable = state.spec is not None and state.limits is not None and (state.answering or draining)
    return Publication(
        state=state.state,
        generation=state.generation,
        endpoint=state.spec.endpoint if state.spec is not None and reachable else None,
        limits=state.limits if reachable else None,
        reason=state.sentence,
        retry_after_s=_retry_after_s(state),
        incident_id=state.incident_id,
    )


def _retry_after_s(state: MachineState) -> float | None:
    resting = state.answering or state.state in (EngineState.PARKED, EngineState.STOPPED)
    if resting or state.purpose in (Purpose.PARK, Purpose.EXIT):
        return None
    return round(max(1.0, state.start_took_s + state.delay_s), 1)


def move(state: MachineState, to: EngineState, now_s: float, sentence: str, **changes: Any) -> MachineState:
    """Enter a state. Raises IllegalMove where core's table has no such move: a defect of ours."""
    check_move(state.state, to)
    return replace(state, state=to, since_s=now_s, sentence=sentence, **changes)


def told(state: MachineState, what: str) -> MachineState:
    """With a sentence about the start that is under way."""
    after = f"; {state.basis}" if state.basis else ""
    return replace(state, sentence=f"{what} (rung {state.history.rung}, generation {state.generation}){after}")


def plan(state: MachineState, now_s: float, sentence: str) -> Step:
    """To PLANNING, on the rung that was asked for or the present one. Only ever called when no group is alive."""
    history = state.history if state.next_rung is None else replace(state.history, rung=min(state.next_rung, len(state.ladder) - 1))
    if state.uses_gpu:
        fitting = history.on_cards(state.cards, state.ladder)
        if fitting is None:
            needed = min(rung.tensor_parallel for rung in state.ladder[history.rung :])
            return park(state, f"parked because no rung fits the {state.cards} cards that can be used: {needed} are needed", now_s)
        history = fitting
    history = history.standing_on(state.ladder)
    planning = move(state, EngineState.PLANNING, now_s, sentence, delay_s=0.0, history=history, next_rung=None)
    return planning, (ev.Plan(planning.generation + 1, planning.rung),)


def again(state: MachineState, now_s: float, sentence: str, *, through_gpu: bool = False) -> Step:
    """To the next life. One on a card looks at the cards first: one may be lost by now, and the last engine's memory still be held."""
    if through_gpu or state.uses_gpu:
        return move(state, EngineState.WAITING_FOR_GPU, now_s, sentence, delay_s=0.0), (ev.WaitForGpu(),)
    return plan(state, now_s, sentence)


def park(state: MachineState, sentence: str, now_s: float) -> Step:
    """To PARKED: a person is needed."""
    parked = move(state, EngineState.PARKED, now_s, sentence, limits=None, recovering=None, delay_s=0.0, purpose=None, stopping=False)
    return parked, (ev.RunHook(sentence),)


def leave(state: MachineState, now_s: float) -> Step:
    """To STOPPED: applianced ends."""
    if state.answering:
        state = move(state, EngineState.DRAINING, now_s, state.sentence)
    return move(state, EngineState.STOPPED, now_s, "stopped", limits=None), (ev.Exit(),)
