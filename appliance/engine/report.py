"""What the scheduler did in the last second, as log lines: evidence of the engine's last moments, without any text."""

from __future__ import annotations

import asyncio
import logging
import time

from appliance.engine.api.service import Service
from appliance.engine.messages import EngineStats

log = logging.getLogger("appliance.engine.report")

_INTERVAL_S = 1.0


async def report_batches(service: Service) -> None:
    """For ever: a line a second of prefill, one of decode, each only when there was any."""
    assert service.model is not None, "reported on before the model was loaded"
    engine = service.model.engine
    before, before_s = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        now, now_s = engine.stats(), time.monotonic()
        for line in batch_lines(before, now, now_s - before_s):
            log.info("%s", line)
        before, before_s = now, now_s


def batch_lines(before: EngineStats, now: EngineStats, elapsed_s: float) -> list[str]:
    """The lines for what happened between two snapshots."""
    prefilled = now.prompt_tokens - before.prompt_tokens
    generated = now.generated_tokens - before.generated_tokens
    load = f"running={now.running} waiting={now.waiting} kv_blocks={now.kv_blocks_used}/{now.kv_blocks_total}"
    lines = []
    if prefilled:
        lines.append(f"Prefill batch. tokens={prefilled} {load}")
    if generated:
        lines.append(f"Decode batch. tokens={generated} tokens_per_s={generated / elapsed_s:.1f} preemptions={now.preemptions} {load}")
    return lines
