"""What the planner offers, brought to the reducer: worked out right before an event is looked at that may end on another rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.config.schema import Config
from appliance.core.causes import Cause
from appliance.core.plan import GpuFacts, Rung
from appliance.supervisor import events as ev
from appliance.supervisor.budget import Budget
from appliance.supervisor.ladder import FORECAST, estimate_in
from appliance.supervisor.machine import MachineState
from appliance.supervisor.policy import TABLE, Response, rung_for_refused

_CALLS_FOR_ANOTHER = (Response.SAFER, Response.SAME_THEN_SAFER, Response.LOST_CARD)


def informed(event: ev.Event, state: MachineState, budget: Budget, config: Config, card: Callable[[], GpuFacts | None]) -> ev.Event:
    """The event with the rungs that are worked out for it, from the one that is in force at this moment."""
    match event:
        case ev.GpuReady() if budget.see(card()):
            return replace(event, ladder=budget.ladder(config, state.history.below))
        case ev.Diagnosed(diagnosis=diagnosis) if _concerns(event, state) and TABLE[diagnosis.cause].response in _CALLS_FOR_ANOTHER:
            return replace(event, offers=_offers(state, budget, config, diagnosis.cause, estimate_in(diagnosis)))
        case ev.ProofRefused() if event.generation == state.generation:
            return replace(event, offers=_offers(state, budget, config, FORECAST))
    return event


def is_last(state: MachineState, budget: Budget, config: Config) -> bool:
    """Whether a rung whose proof is refused has to serve all the same."""
    return rung_for_refused(state.history, state.ladder, _offers(state, budget, config, FORECAST)) is None


def _concerns(event: ev.Diagnosed, state: MachineState) -> bool:
    """Of the life that failed, by nobody from outside, and not of a refused proof, which brought its offers along."""
    failure = state.failure
    return event.generation == state.generation and failure is not None and not failure.outside and not failure.refused


def _offers(
    state: MachineState, budget: Budget, config: Config, cause: Cause, estimated_context_tokens: int | None = None
) -> tuple[Rung, ...] | None:
    return budget.offers(config, state.rung, cause, state.history.tried, estimated_context_tokens)
