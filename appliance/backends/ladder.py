"""A ladder without arithmetic: halve one thing a rung. For engines whose memory nobody has measured."""

from __future__ import annotations

from dataclasses import replace

from appliance.config.schema import Config
from appliance.core.plan import Rung

ROUNDS = 2
CHUNK_MIN_TOKENS = 16
CONTEXT_MIN_TOKENS = 256


def halving_ladder(config: Config, context_length_tokens: int, kv_dtype: str) -> tuple[Rung, ...]:
    """As configured; half the prefill chunk; half the sequences; half the context; and each of them once more.

    A rung that would change nothing is left out.

    Args:
        context_length_tokens: what rung 0 serves, 0 where it is not known: then the context is not halved.
    """
    rungs = [
        Rung(
            index=0,
            mem_fraction=config.budget.mem_fraction,
            context_length_tokens=context_length_tokens,
            prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
            max_running=config.engine.max_running,
            kv_dtype=kv_dtype,
        )
    ]
    for _ in range(ROUNDS):
        for halve in (_half_chunk, _half_running, _half_context):
            safer = halve(rungs[-1])
            if safer is not None:
                rungs.append(replace(safer, index=len(rungs)))
    return tuple(rungs)


def _half_chunk(rung: Rung) -> Rung | None:
    chunk = rung.prefill_chunk_tokens // 2
    gives_up = f"time to first token: prompts are read {chunk} tokens at a time"
    safer = replace(rung, prefill_chunk_tokens=chunk, gives_up=gives_up, gains="half the activation peak of a prefill")
    return safer if chunk >= CHUNK_MIN_TOKENS else None


def _half_running(rung: Rung) -> Rung | None:
    running = rung.max_running // 2
    gives_up = f"throughput: {running} sequences are decoded together"
    return replace(rung, max_running=running, gives_up=gives_up, gains="half the sequences' memory") if running >= 1 else None


def _half_context(rung: Rung) -> Rung | None:
    context = rung.context_length_tokens // 2
    gives_up = f"long prompts: the context is {context} tokens"
    safer = replace(rung, context_length_tokens=context, gives_up=gives_up, gains="half the KV cache of the longest sequence")
    return safer if context >= CONTEXT_MIN_TOKENS else None
