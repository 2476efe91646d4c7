"""Rungs of an engine on a card, where neither card nor model could be read: what helped others, from what costs least.

With facts `ladder` computes them; these are fixed steps. Each asks for less than the one before, in bytes or in features that may fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core.plan import Rung
from appliance.planner.inputs import counted
from appliance.planner.ladder import MOST_RUNGS

FRACTION_STEP = 0.02
LOWEST_FRACTION = 0.5
SMALLEST_FRACTION_STEP = 0.01
SMALLEST_CHUNK_TOKENS = 64
SMALLEST_CONTEXT_TOKENS = 1024

Step = Callable[[Rung], Rung | None]


def card_ladder(first: Rung) -> tuple[Rung, ...]:
    """Below rung 0 of an engine with a fraction and features of its own. Steps that cannot be made are left out.

    The last rung of several cards is one card: whether the model fits it, the engine says.
    """
    rungs = _below(first, _STEPS)
    if first.tensor_parallel < 2:
        return rungs
    several = rungs[: MOST_RUNGS - 1]
    last = several[-1] if several else first
    price = f"{first.tensor_parallel - 1} of {first.tensor_parallel} cards, and with them most of the KV cache"
    return (*several, replace(last, index=last.index + 1, tensor_parallel=1, gives_up=price, gains="a lost card does not matter"))


def llamacpp_ladder(first: Rung) -> tuple[Rung, ...]:
    """Of llama.cpp, which takes all of its memory at the start, most of it for the context."""
    return _below(first, _LLAMACPP_STEPS)


def smaller_pools(failed: Rung, held_fraction: float) -> tuple[Rung, ...]:
    """For an engine made for cards that computes on the CPU and was out of memory: its fraction is one of the machine's memory there.

    What the weights leave of it becomes KV cache at the start: with a smaller chunk or fewer sequences it takes just as much.

    Args:
        held_fraction: what weights and the engine itself take of the machine's memory.
    """

    def half_pool(rung: Rung) -> Rung | None:
        fraction = round(held_fraction + (rung.mem_fraction - held_fraction) / 2, 3)
        if rung.mem_fraction - fraction < SMALLEST_FRACTION_STEP:
            return None
        price = f"half of the KV cache: {fraction:g} of the machine's memory for the engine instead of {rung.mem_fraction:g}"
        return replace(rung, mem_fraction=fraction, gives_up=price, gains="the memory that this half took; all else stays as it is")

    return _below(failed, (half_pool, half_pool, half_pool, _half_chunk, half_pool, _half_chunk))


def shorter_contexts(failed: Rung, estimated_context_tokens: int | None = None) -> tuple[Rung, ...]:
    """For a KV cache that is too small for one sequence, with as much of it as before: what the engine says would fit, then the halves."""

    def estimated(rung: Rung) -> Rung | None:
        context = (estimated_context_tokens or 0) // 1024 * 1024
        return _with_context(rung, context) if SMALLEST_CONTEXT_TOKENS <= context < rung.context_length_tokens else None

    return _below(failed, (estimated, _half_context, _half_context, _half_context))


def _below(first: Rung, steps: tuple[Step, ...]) -> tuple[Rung, ...]:
    rungs: list[Rung] = []
    now = first
    for step in steps:
        after = step(now)
        if after is not None and len(rungs) < MOST_RUNGS:
            now = replace(after, index=now.index + 1, plan=None)
            rungs.append(now)
    return tuple(rungs)


def _half_chunk(rung: Rung) -> Rung | None:
    chunk = rung.prefill_chunk_tokens // 2
    if chunk < SMALLEST_CHUNK_TOKENS:
        return None
    price = f"prefill speed: chunks of {chunk:,} tokens instead of {rung.prefill_chunk_tokens:,}"
    return replace(rung, prefill_chunk_tokens=chunk, gives_up=price, gains="half the memory of a prefill step, and costs no context")


def _lower_fraction(rung: Rung) -> Rung | None:
    fraction = round(rung.mem_fraction - FRACTION_STEP, 4)
    if fraction < LOWEST_FRACTION:
        return None
    price = f"KV cache: a fraction of {fraction:g} instead of {rung.mem_fraction:g}"
    return replace(rung, mem_fraction=fraction, gives_up=price, gains="two hundredths of the card for what a step takes")


def _half_running(rung: Rung) -> Rung | None:
    running = rung.max_running // 2
    if running < 1:
        return None
    slots = rung.state_slots // 2 if rung.state_slots is not None else None
    price = f"concurrency: {counted(running)} at once instead of {rung.max_running}"
    return replace(rung, max_running=running, state_slots=slots, gives_up=price, gains="half the memory of the running sequences")


def _half_context(rung: Rung) -> Rung | None:
    context = rung.context_length_tokens // 2
    return _with_context(rung, context) if context >= SMALLEST_CONTEXT_TOKENS else None


def _with_context(rung: Rung, context: int) -> Rung:
    price = f"long prompts: a context of {context:,} tokens instead of {rung.context_length_tokens:,}"
    share = "half" if context == rung.context_length_tokens // 2 else "less of"
    return replace(rung, context_length_tokens=context, gives_up=price, gains=f"{share} the memory of the longest sequence")


def _off(feature: str, price: str, gain: str, applies: Callable[[Rung], bool] = lambda _: True) -> Step:
    def step(rung: Rung) -> Rung | None:
        if feature in rung.features_off or not applies(rung):
            return None
        return replace(rung, features_off=rung.features_off | {feature}, gives_up=price, gains=gain)

    return step


def _several_cards(rung: Rung) -> bool:
    return rung.tensor_parallel > 1


def _drafts(rung: Rung) -> bool:
    return rung.draft_tokens > 0


_STEPS: tuple[Step, ...] = (
    _half_chunk,
    _lower_fraction,
    _off("p2p", "some speed between the cards: traffic goes through host memory", "no direct traffic that can hang", _several_cards),
    _off("overlap_schedule", "some decode speed: the scheduler waits for the card", "no races between the two"),
    _half_running,
    _off("speculative", "decode speed: no speculative decoding", "one model less that can fail", _drafts),
    _off("cuda_graph", "decode speed: no CUDA graphs", "their memory, and one thing less that can hang"),
    _off("custom_all_reduce", "some decode speed: NCCL's all-reduce", "the collective that more people use", _several_cards),
    _half_chunk,
    _lower_fraction,
    _half_context,
    _off("attention_backend", "attention speed: the second choice of kernels", "other kernels than those that failed"),
    _half_running,
    _lower_fraction,
    _half_context,
)
_LLAMACPP_STEPS: tuple[Step, ...] = (
    _half_context, _half_chunk, _half_running,
    _off("cuda_graph", "decode speed: no CUDA graphs", "their memory, and one thing less that can hang"),
    _half_context, _half_chunk, _half_running,
    _off("attention_backend", "attention speed: no flash attention", "other kernels than those that failed"),
    _half_context, _half_running, _half_context,
)  # fmt: skip
