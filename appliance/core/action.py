"""What the appliance does about a diagnosis."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from appliance.core.plan import Rung


class ActionKind(enum.Enum):
    """A closed vocabulary; each kind is one row family of docs/failures.md."""

    RESTART_SAME = "restart_same"
    RESTART_SAFER = "restart_safer"
    WAIT = "wait"
    USE_REMAINING_GPU = "use_remaining_gpu"
    QUARANTINE = "quarantine"
    ROLL_BACK = "roll_back"
    PARK = "park"
    NONE = "none"
    """Nothing is wrong: a requested stop, a client that left."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision.

    Attributes:
        kind: what is done.
        basis: "did X because Y (evidence Z)": the same string in the log, the incident and `appliancectl status`.
        delay_s: wait before it is done (back-off).
        rung: the setting to restart on, for the restarting kinds.
        request_fingerprint: for QUARANTINE.
        runtime: for ROLL_BACK, the runtime to go back to.
    """

    kind: ActionKind
    basis: str
    delay_s: float = 0.0
    rung: Rung | None = None
    request_fingerprint: str | None = None
    runtime: str | None = None
