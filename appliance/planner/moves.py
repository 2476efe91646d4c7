"""One change of a setting each, with its price and its gain in words. A move that cannot be made is None.

The words follow "gives up" and "gains": they are printed with every step onto a safer rung.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from appliance.core.errors import BudgetError
from appliance.core.plan import MemoryPlan
from appliance.planner.activation import step_token_bytes
from appliance.planner.carry import carried
from appliance.planner.chain import CONTEXT_STEP_TOKENS, gib
from appliance.planner.choose import attempt
from appliance.planner.elements import dtype_bytes, is_16_bit
from appliance.planner.engines import rules_of
from appliance.planner.features import CURRENT_RUNTIME
from appliance.planner.inputs import Choice, PlanInputs, counted

FRACTION_STEP = 0.02
RAISE_STEP = 0.01
SMALLEST_CHUNK_TOKENS = 256
SMALLEST_CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """Resolved inputs with their fraction and context, their plan, and what the move to them cost.

    `settles`: memory that a move frees goes to the headroom, by a lower fraction; else it stays with the KV cache.
    """

    inputs: PlanInputs
    plan: MemoryPlan
    gives_up: str = ""
    gains: str = ""
    settles: bool = True


Move = Callable[[Step], Step | None]


def _replanned(step: Step, fraction: float | None = None, **changes: object) -> Step:
    """The changed setting at a fraction, with as much of the context as fits; a pool too small for any slack gives that up first."""
    rules = rules_of(step.inputs.engine)
    wanted = step.inputs.context_length_tokens or step.plan.context_length_tokens
    share = step.plan.mem_fraction if fraction is None else round(fraction, 4)
    loosened = replace(step.inputs, mem_fraction=share, context_length_tokens=None, **changes)  # type: ignore[arg-type]
    changed = carried(step.inputs, loosened)
    loose = rules.plan_at(changed, share)
    whole = loose.sequence_tokens // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
    fits = wanted if loose.sequence_tokens >= wanted else loose.context_length_tokens or whole
    exact = replace(changed, context_length_tokens=fits or wanted)
    return Step(exact, rules.plan_at(exact, share), settles=step.settles)


def _settled(before: Step, after: Step, **changes: object) -> Step:
    """The same with a lower fraction, as long as the KV cache holds as many tokens as before: what was freed goes to the headroom."""
    while before.settles and after.plan.mem_fraction > 2 * RAISE_STEP:
        lower = _replanned(before, after.plan.mem_fraction - RAISE_STEP, **changes)
        if lower.plan.kv_tokens < before.plan.kv_tokens or lower.plan.context_length_tokens < before.plan.context_length_tokens:
            break
        after = lower
    return after


def step_bytes(inputs: PlanInputs) -> int:
    """Live tensors of one prefill step."""
    return inputs.chunk * step_token_bytes(inputs.model, inputs.tensor_parallel)


def half_chunk(step: Step) -> Step | None:
    """Costs no context: the activation peak is proportional to the chunk."""
    chunk = step.inputs.chunk // 2
    if chunk < SMALLEST_CHUNK_TOKENS:
        return None
    after = _settled(step, _replanned(step, prefill_chunk_tokens=chunk), prefill_chunk_tokens=chunk)
    saved = max(step.plan.activation_peak_bytes - after.plan.activation_peak_bytes, step_bytes(step.inputs) - step_bytes(after.inputs))
    return replace(
        after,
        gives_up=f"prefill speed: chunks of {chunk:,} tokens instead of {step.inputs.chunk:,}",
        gains=f"{gib(saved)} less at the prefill peak, and costs no context",
    )


def lower_fraction(step: Step) -> Step | None:
    """Two hundredths less for the static memory, with the context cut to fit."""
    fraction = step.plan.mem_fraction - FRACTION_STEP
    after = _replanned(step, fraction) if fraction > 0 else None
    if after is None or after.plan.context_length_tokens < SMALLEST_CONTEXT_TOKENS or after.plan.sequence_tokens < SMALLEST_CONTEXT_TOKENS:
        return None
    gained = after.plan.headroom_bytes - step.plan.headroom_bytes
    return replace(
        after, gives_up=_context_price(step, after), gains=f"{gib(gained)} of headroom at a fraction of {after.plan.mem_fraction:g}"
    )


def raise_fraction(step: Step) -> Step | None:
    """The other direction: a hundredth more for the static memory, and more where the pool is still short of the context then.

    Only while the headroom covers the peak, and up to the red line; what then is still short is cut off the context.
    """
    fraction, highest = step.plan.mem_fraction, None
    rules = rules_of(step.inputs.engine)
    while (fraction := round(fraction + RAISE_STEP, 4)) <= step.inputs.red_line:
        plan = rules.plan_at(replace(step.inputs, mem_fraction=fraction), fraction)
        if plan.headroom_bytes < plan.activation_peak_bytes:
            break
        highest = fraction
        if plan.sequence_tokens >= step.plan.context_length_tokens:
            break
    if highest is None:
        return None
    after = _replanned(step, highest)
    lost, was, now = step.plan.headroom_bytes - after.plan.headroom_bytes, step.plan.context_length_tokens, after.plan.context_length_tokens
    return replace(
        after,
        gives_up=f"{gib(lost)} of headroom" + (f"; {_context_price(step, after)}" if now < was else ""),
        gains=f"{after.plan.kv_tokens - step.plan.kv_tokens:,} tokens of KV cache at a fraction of {highest:g}",
    )


def half_running(step: Step) -> Step | None:
    """Half the sequences; the fraction falls by what their state took, so that the context stays."""
    running = step.inputs.running // 2
    if running < 1:
        return None
    after = _settled(step, _replanned(step, None, max_running=running, state_slots=None), max_running=running, state_slots=None)
    price = f"concurrency: {counted(running)} at once instead of {step.inputs.running}"
    return replace(after, gives_up=price, gains=_more_tokens(step, after))


def half_running_only(step: Step) -> Step | None:
    """Half the sequences, for a fault that comes with many of them."""
    after = half_running(step)
    return None if after is None else replace(after, gains="fewer sequences in one batch, which is where such faults were seen")


def graphs_off(step: Step) -> Step | None:
    """No CUDA graphs."""
    after = _switched_off(step, "cuda_graph", "")
    if after is None:
        return None
    freed = after.plan.headroom_bytes + after.plan.kv_pool_bytes - step.plan.headroom_bytes - step.plan.kv_pool_bytes
    return replace(after, gives_up="decode speed: no CUDA graphs", gains=f"{gib(max(0, freed))}, and one thing less that can hang")


def overlap_off(step: Step) -> Step | None:
    """No overlap between the scheduler and the card."""
    return _switched_off(step, "overlap_schedule", "some decode speed: the scheduler waits for the card", "no races between the two")


def other_attention(step: Step) -> Step | None:
    """The engine's other attention kernels, where they can read this KV dtype (Triton refuses 8-bit floats before Ada)."""
    capability = step.inputs.gpu.compute_capability
    if step.inputs.kv_dtype.startswith("fp8") and (capability is None or capability < (8, 9)):
        return None
    return _switched_off(step, "attention_backend", "attention speed: the second choice of kernels", "other kernels than those that failed")


def p2p_off(step: Step) -> Step | None:
    """Traffic between cards through host memory."""
    if step.inputs.tensor_parallel < 2:
        return None
    return _switched_off(step, "p2p", "some speed between the cards: traffic goes through host memory", "no direct traffic that can hang")


def custom_all_reduce_off(step: Step) -> Step | None:
    """NCCL's all-reduce instead of the engine's."""
    if step.inputs.tensor_parallel < 2:
        return None
    return _switched_off(step, "custom_all_reduce", "some decode speed: NCCL's all-reduce", "the collective that more people use")


def runtime_back(step: Step) -> Step | None:
    """The engine version before this one; which one that is, the runtime's owner knows."""
    return _switched_off(step, CURRENT_RUNTIME, "what the newer engine version brought", "the version that ran before")


def drafter_off(step: Step) -> Step | None:
    """No speculative decoding: no drafter, no drafted states."""
    if not step.inputs.draft_tokens or "speculative" in step.inputs.features_off:
        return None
    after = _switched_off(step, "speculative", "decode speed: no speculative decoding")
    if after is None:
        return None
    return replace(after, gains=f"{_more_tokens(step, after)}, and one model less that can fail")


def _switched_off(step: Step, feature: str, gives_up: str, gains: str = "") -> Step | None:
    if feature in step.inputs.features_off or step.inputs.engine == "native":
        return None
    off = step.inputs.features_off | {feature}
    after = _settled(step, _replanned(step, features_off=off), features_off=off)
    return replace(after, gives_up=gives_up, gains=gains)


def half_state(step: Step) -> Step | None:
    """Linear state in 16 bits."""
    linear, measured = step.inputs.model.linear, step.inputs.measured.linear_state_bytes
    if linear is None or measured is not None or dtype_bytes(step.inputs.state_dtype or linear.state_dtype) <= 2:
        return None
    after = _replanned(step, state_dtype="bfloat16", features_off=step.inputs.features_off | {"state_float32"})
    return replace(after, gives_up="digits of the linear state: 16 bits instead of 32", gains=_more_tokens(step, after))


def eight_bit_kv(step: Step) -> Step | None:
    """The KV cache in 8 bits."""
    word = step.inputs.model.dtype if step.inputs.kv_dtype in ("auto", "") else step.inputs.kv_dtype
    if step.inputs.engine == "native" or not is_16_bit(word):
        return None
    half = "q8_0" if step.inputs.engine == "llamacpp" else "fp8_e4m3"
    after = _replanned(step, kv_dtype=half)
    return replace(after, gives_up=f"digits of the KV cache: {half} instead of {word}", gains=_more_tokens(step, after))


def shorter_context(step: Step) -> Step | None:
    """Three quarters of the context."""
    after = context_of(step, step.plan.context_length_tokens * 3 // 4)
    return None if after is step else after


def context_of(step: Step, tokens: int) -> Step:
    """A context of so many tokens at most, a multiple of 1024; the step itself where that is no shorter."""
    context = tokens // 1024 * 1024
    if context < SMALLEST_CONTEXT_TOKENS or context >= step.plan.context_length_tokens:
        return step
    changed = replace(step.inputs, context_length_tokens=context, mem_fraction=step.plan.mem_fraction)
    after = Step(changed, rules_of(changed.engine).plan_at(changed, step.plan.mem_fraction), settles=step.settles)
    lost = step.plan.context_length_tokens - context
    return replace(after, gives_up=_context_price(step, after), gains=f"{gib(lost * step.plan.kv_bytes_per_token)} less for one sequence")


def one_card(step: Step) -> Step | None:
    """The model on one card, as much of it as fits; with an 8-bit KV cache where that is what it takes."""
    if step.inputs.tensor_parallel < 2:
        return None
    alone = carried(
        step.inputs, replace(step.inputs, tensor_parallel=1, mem_fraction=None, context_length_tokens=None, min_context_tokens=0)
    )
    shared = step.inputs.measured.shared_otherwise(step.inputs.tensor_parallel)
    free = replace(alone, measured=replace(alone.measured, weight_bytes=shared.weight_bytes, kv_pool_bytes=None))
    half = "q8_0" if step.inputs.engine == "llamacpp" else "fp8_e4m3"
    for candidate in (free, replace(free, kv_dtype=half)):
        try:
            result = attempt(candidate)
        except BudgetError:
            continue
        if isinstance(result, Choice):
            after = Step(result.inputs, result.plan, settles=step.settles)
            price = f"{step.inputs.tensor_parallel - 1} of {step.inputs.tensor_parallel} cards; {_context_price(step, after)}"
            return replace(after, gives_up=price, gains="no traffic between cards; a lost card does not matter")
    return None


def _more_tokens(before: Step, after: Step) -> str:
    """What was gained in the KV cache, or in the headroom where the cache stayed."""
    more = after.plan.kv_tokens - before.plan.kv_tokens
    if more > 0:
        return f"{more:,} tokens of KV cache"
    headroom_bytes = after.plan.headroom_bytes - before.plan.headroom_bytes
    return f"{gib(headroom_bytes)} of headroom" if headroom_bytes > 0 else "less at once in one step"


def _context_price(before: Step, after: Step) -> str:
    was, now = before.plan.context_length_tokens, after.plan.context_length_tokens
    if now == was:
        return f"{max(0, before.plan.kv_tokens - after.plan.kv_tokens):,} tokens of KV cache, no context"
    return f"long prompts: a context of {now:,} tokens instead of {was:,}"
