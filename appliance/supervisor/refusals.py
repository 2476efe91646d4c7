"""A living engine that refused accesses to KV blocks: an incident without a crash. Its clients saw a pause; its owner is to know why.

Pure, but for what was told already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Confidence, Diagnosis
from appliance.core.evidence import Source
from appliance.supervisor import events as ev
from appliance.supervisor.log_ring import LogLine

AGAIN_S = 60.0
"""Of one life there is an incident at most so often: the engine may refuse something in every step."""
_SAID = "KV access refused"
_REMEDIES = (
    "Report it, with `appliancectl diagnose --bundle`: what a request holds and what it reaches for are the engine's own books.",
    "Should it come again with different requests, test the memory of the machine or the card: a bit that flips looks like this.",
)


class Refusals:
    """Owns what was told of the present life."""

    def __init__(self) -> None:
        self._generation = -1
        self._told = 0
        self._told_s = float("-inf")

    def news(self, event: ev.Progress, now_s: float) -> int:
        """How many accesses were refused since this last said so; 0: none, or it is too early to say it again."""
        if event.generation != self._generation:
            self._generation, self._told, self._told_s = event.generation, 0, float("-inf")
        since = event.block_violations - self._told
        if since <= 0 or now_s - self._told_s < AGAIN_S:
            return 0
        self._told, self._told_s = event.block_violations, now_s
        return since


def line_of(lines: Sequence[LogLine]) -> LogLine | None:
    """The engine's newest word on it."""
    return next((line for line in reversed(lines) if _SAID in line.text), None)


def diagnosis_of(count: int, line: LogLine | None) -> Diagnosis:
    """Nothing ended: works, needs a look. Without the line, which may come later, the counter of /health is what it stands on."""
    counted = Citation(Source.PROBE, 0, f"/health counts {count} refused accesses to KV blocks", time.time())
    said = counted if line is None else Citation(Source.ENGINE_LOG, line.number, line.text, line.time_s)
    what = "an access to a KV block that was not the request's to touch" if count == 1 else f"{count} accesses to KV blocks"
    sentence = f"The engine refused {what}, and computed again whatever had asked for it"
    return Diagnosis(Cause.OK_DEGRADED, Confidence.HIGH, sentence, said, remedies=_REMEDIES, numbers=(("block_violations", float(count)),))
