"""The built-in engine with the demo model, except that one prompt kills it: the word POISON in it is its end.

    python tests/fakes/poisoned_engine.py (the options of `python -m appliance.engine`)

Everything else is the engine that people get: it is started by `engine.command`, and dies in its own thread, in the middle
of whatever else it computes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance.engine import __main__ as engine
from appliance.engine.messages import GenerateRequest
from appliance.engine.text import ModelText

POISON = "zzyzx"


def poison() -> None:
    """Before the model loads: whatever is planned for prefill is looked at."""
    from appliance.engine.scheduler import Chunk, Scheduler

    text = ModelText(engine.parse_arguments(sys.argv[1:]).model)
    plan = Scheduler.plan_prefill

    def is_deadly(request: GenerateRequest) -> bool:
        return POISON in text.decode(request.prompt_ids)

    def plan_prefill(self: Scheduler) -> list[Chunk]:
        chunks = plan(self)
        if any(chunk.completes and is_deadly(chunk.sequence.request) for chunk in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        return chunks

    Scheduler.plan_prefill = plan_prefill  # type: ignore[method-assign]


if __name__ == "__main__":
    poison()
    engine.main()
