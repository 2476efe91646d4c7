"""The states of the engine as the supervisor sees it, and the moves between them that are legal.

This module must not depend on any non-stdlib module: the gateway, the command line and the tests read it.
"""

from __future__ import annotations

import enum


class EngineState(enum.Enum):
    """Where the engine stands. One writer: the reducer of appliance/supervisor/machine.py."""

    WAITING_FOR_GPU = "waiting_for_gpu"
    """The driver, the device nodes or the cards are not there yet; the reason is in the status sentence."""
    PLANNING = "planning"
    """The next rung is being chosen and turned into a command line."""
    STARTING = "starting"
    """A process exists and loads; it has not answered a probe yet."""
    PROVING = "proving"
    """It answers; the canary decides whether clients may have it."""
    SERVING = "serving"
    """Clients are served on the rung the owner configured."""
    DEGRADED = "degraded"
    """Clients are served on a safer rung than the owner configured, or on fewer cards."""
    DRAINING = "draining"
    """A requested stop or restart: what runs may finish, nothing new begins."""
    BACKOFF = "backoff"
    """The engine is gone; the old process group is being emptied and the wait before the next try runs."""
    PARKED = "parked"
    """Nothing is left to try; a person is needed. applianced stays up and says why."""
    STOPPED = "stopped"
    """Stopped because we were asked to. Final for this life of applianced."""


ALLOWED_MOVES: dict[EngineState, frozenset[EngineState]] = {
    EngineState.WAITING_FOR_GPU: frozenset({EngineState.PLANNING, EngineState.PARKED, EngineState.STOPPED}),
    EngineState.PLANNING: frozenset(
        {
            EngineState.STARTING,
            EngineState.WAITING_FOR_GPU,
            EngineState.BACKOFF,
            EngineState.PARKED,
            EngineState.STOPPED,
        }
    ),
    EngineState.STARTING: frozenset(
        {EngineState.PROVING, EngineState.BACKOFF, EngineState.PARKED, EngineState.DRAINING, EngineState.STOPPED}
    ),
    EngineState.PROVING: frozenset(
        {
            EngineState.SERVING,
            EngineState.DEGRADED,
            EngineState.BACKOFF,
            EngineState.PARKED,
            EngineState.DRAINING,
            EngineState.STOPPED,
        }
    ),
    EngineState.SERVING: frozenset({EngineState.DEGRADED, EngineState.DRAINING, EngineState.BACKOFF, EngineState.PARKED}),
    EngineState.DEGRADED: frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.BACKOFF, EngineState.PARKED}),
    EngineState.DRAINING: frozenset({EngineState.STOPPED, EngineState.BACKOFF, EngineState.PARKED}),
    EngineState.BACKOFF: frozenset({EngineState.PLANNING, EngineState.WAITING_FOR_GPU, EngineState.PARKED, EngineState.STOPPED}),
    EngineState.PARKED: frozenset({EngineState.PLANNING, EngineState.WAITING_FOR_GPU, EngineState.STOPPED}),
    EngineState.STOPPED: frozenset(),
}

ANSWERING = frozenset({EngineState.SERVING, EngineState.DEGRADED})
"""Clients' requests go to the engine."""
COMING_BACK = frozenset(
    {
        EngineState.WAITING_FOR_GPU,
        EngineState.PLANNING,
        EngineState.STARTING,
        EngineState.PROVING,
        EngineState.BACKOFF,
    }
)
"""No answer now, but holding a request makes sense: the engine is on its way."""


class IllegalMove(AssertionError):
    """A move outside ALLOWED_MOVES: a defect of the reducer, never of the engine."""


def check_move(before: EngineState, after: EngineState) -> None:
    """Raise IllegalMove unless the move is in the table (staying is always allowed)."""
    if after is not before and after not in ALLOWED_MOVES[before]:
        raise IllegalMove(f"{before.value} -> {after.value} is not an allowed move; please report this")
