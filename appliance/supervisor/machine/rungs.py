"""The reducer's part about the ladder: what stands on it, and what a step along it leaves there.

The ladder is the rungs that were taken so far, from the configured one down to the one in force, and below it what is offered from here.
A rung's index is its place on it, at all times. What was taken stays where it is, so that `restart --rung N`, a climb and a fall back mean
the same rung from one failure to the next; what was only offered makes room for what the next failure calls for.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import Rung
from appliance.supervisor.machine.state import MachineState

Ladder = tuple[Rung, ...]


def descended(ladder: Ladder, at: int, offers: Ladder, chosen: Rung) -> Ladder:
    """Down from the rung at this place onto one of those that were offered, with the rest of them below it.

    The rung for fewer cards stays the last one where none of these is one: a card may be missing at the next start.
    """
    begin = next(place for place, rung in enumerate(offers) if rung.setting == chosen.setting)
    taken = offers[begin:]
    fewest = min(rung.tensor_parallel for rung in taken)
    fewer = next((rung for rung in ladder[:at:-1] if rung.tensor_parallel < fewest), None)
    if fewer is not None:  # what was switched off on the way is off there too
        taken = (*taken, replace(fewer, features_off=fewer.features_off | chosen.features_off))
    return numbered((*ladder[: at + 1], *taken))


def numbered(rungs: Ladder) -> Ladder:
    """Each with its place as its index."""
    return tuple(rung if rung.index == place else replace(rung, index=place) for place, rung in enumerate(rungs))


def relaid(state: MachineState, ladder: Ladder, *, anew: bool = False) -> MachineState:
    """With the ladder as it is worked out now.

    Where rungs were taken, those stay, and what was offered below them, with the plans that are known of them now.

    Args:
        anew: it is another configuration's: nothing of the old one's is remembered, and the next engine begins on rung 0.
    """
    if anew:
        return replace(state, ladder=ladder, history=state.history.anew(), next_rung=None)
    if not state.history.below:
        return replace(state, ladder=ladder, history=state.history.fitted(len(ladder)))
    plans = {rung.setting: rung.plan for rung in ladder}
    kept = tuple(replace(rung, plan=plans.get(rung.setting, rung.plan)) for rung in state.ladder[1:])
    return replace(state, ladder=(ladder[0], *kept))
