"""What becomes of a request whose engine died. Pure: the seam behind which exact continuation goes.

Today: nothing of the answer sent → the same body again; otherwise the stream ends with an error event. The relay asks
here and nowhere else, so a request that can be continued needs a new verdict here and a recorder in the relay.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from appliance.core.requests import Resumability


class Verdict(enum.Enum):
    """What to do."""

    AGAIN = "again"
    """Wait for an engine and send the same body."""
    FAIL_SENT = "fail_sent"
    """Part of the answer is with the client and cannot be continued."""
    FAIL_ATTEMPTS = "fail_attempts"
    """It has lost as many engines as it may."""
    FAIL_WAITED = "fail_waited"
    """It has waited as long as it may."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The facts at the moment of a loss.

    Attributes:
        resumability: of the request.
        attempts: engine lives that have had it, this one included.
        waited_s: since its first loss.
    """

    resumability: Resumability
    attempts: int
    waited_s: float


def after_loss(loss: Loss, *, max_attempts: int, max_wait_s: float) -> Verdict:
    """`max_attempts` losses are forgiven; the next one is not."""
    if loss.resumability is not Resumability.REPLAY:
        return Verdict.FAIL_SENT
    if loss.attempts > max_attempts:
        return Verdict.FAIL_ATTEMPTS
    return Verdict.FAIL_WAITED if loss.waited_s > max_wait_s else Verdict.AGAIN
