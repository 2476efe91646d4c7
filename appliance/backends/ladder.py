"""A ladder without arithmetic: halve one thing a rung. For engines whose memory nobody has measured."""

from __future__ import annotations

from dataclasses import replace

from appliance.config.schema import Config
from appliance.core.plan import Rung

CHUNK_MIN_TOKENS = 16
CONTEXT_MIN_TOKENS = 256


def halving_ladder(config: Config, context_length_tokens: int, kv_dtype: str) -> tuple[Rung, ...]:
    """As configured; half the prefill chunk; half the sequences; half the context. A rung that would change nothing is left out.

    Args:
        context_length_tokens: what rung 0 serves, 0 where it is not known: then the context is not halved.
    """
    engine = config.engine
    rungs = [
        Rung(
            index=0,
            mem_fraction=config.budget.mem_fraction,
            context_length_tokens=context_length_tokens,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            max_running=engine.max_running,
            kv_dtype=kv_dtype,
        )
    ]
    if (chunk := rungs[-1].prefill_chunk_tokens // 2) >= CHUNK_MIN_TOKENS:
        gives_up = f"time to first token: prompts are read {chunk} tokens at a time"
        rungs.append(_next(rungs[-1], "half the activation peak of a prefill", gives_up, prefill_chunk_tokens=chunk))
    if (running := rungs[-1].max_running // 2) >= 1:
        gives_up = f"throughput: {running} sequences are decoded together"
        rungs.append(_next(rungs[-1], "half the sequences' memory", gives_up, max_running=running))
    if (context := context_length_tokens // 2) >= CONTEXT_MIN_TOKENS:
        gives_up = f"long prompts: the context is {context} tokens"
        rungs.append(_next(rungs[-1], "half the KV cache of the longest sequence", gives_up, context_length_tokens=context))
    return tuple(rungs)


def _next(rung: Rung, gains: str, gives_up: str, **changes: int) -> Rung:
    return replace(rung, index=rung.index + 1, gains=gains, gives_up=gives_up, **changes)  # type: ignore[arg-type]
