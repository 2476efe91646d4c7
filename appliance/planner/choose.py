"""The choice: the highest fraction whose headroom covers the peak with its margin, and the context that the pool then holds."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, Rung
from appliance.planner.between_cards import DIRECT, why_off
from appliance.planner.chain import gib, needed_headroom_bytes
from appliance.planner.checks import checked
from appliance.planner.engines import EngineRules, rules_of
from appliance.planner.inputs import WARN_SHARE, Choice, PlanInputs, Shortfall, TableRow

STEP = 0.01
LOWEST = 0.20
TABLE_FRACTIONS = (0.95, 0.94, 0.93, 0.92, 0.91, 0.90, 0.88, 0.85, 0.80, 0.75, 0.70)


def attempt(inputs: PlanInputs) -> Choice | Shortfall:
    """Choose, or work out the fraction that is given; a shortfall when it cannot run.

    Raises:
        PlanInputError: something that was asked for cannot be.
    """
    rules = rules_of(inputs.engine)
    resolved = rules.resolve(checked(inputs))
    fraction = _fraction(resolved, rules) if resolved.mem_fraction is None else resolved.mem_fraction
    plan = rules.plan_at(resolved, fraction)
    table = _table(resolved, rules, fraction)
    wrong = shortfall_sentence(resolved, plan)
    if wrong:
        return Shortfall(wrong, resolved, plan, table)
    chosen = replace(resolved, mem_fraction=fraction, context_length_tokens=plan.context_length_tokens)
    reason = _reason(resolved, rules, plan, given=inputs.mem_fraction is not None)
    return Choice(chosen, rung_of(chosen, plan), table, reason, _warnings(resolved, plan))


def rung_of(inputs: PlanInputs, plan: MemoryPlan, index: int = 0, gives_up: str = "", gains: str = "") -> Rung:
    """Resolved inputs and their plan as a setting."""
    slots = rules_of(inputs.engine).state_slots
    return Rung(
        index=index,
        mem_fraction=plan.mem_fraction,
        context_length_tokens=plan.context_length_tokens,
        prefill_chunk_tokens=inputs.chunk,
        max_running=inputs.running,
        kv_dtype=inputs.kv_dtype,
        tensor_parallel=inputs.tensor_parallel,
        features_off=inputs.features_off,
        draft_tokens=0 if "speculative" in inputs.features_off else inputs.draft_tokens,
        state_slots=slots(inputs) if slots is not None and inputs.model.linear is not None else None,
        state_dtype=inputs.state_dtype if inputs.model.linear is not None else None,
        prefix_cache=inputs.prefix_cache,
        block_tokens=inputs.block_tokens,
        language_only=inputs.language_only,
        gives_up=gives_up,
        gains=gains,
        plan=plan,
    )


def _fraction(inputs: PlanInputs, rules: EngineRules) -> float:
    """The highest fraction, in steps of 0.01 from the red line down, whose headroom is enough; the lowest one when none is."""
    if rules.tightest_fraction is not None and inputs.context_length_tokens is None:
        return rules.tightest_fraction(inputs)
    steps = round((inputs.red_line - LOWEST) / STEP)
    for step in range(steps + 1):
        fraction = round(inputs.red_line - step * STEP, 4)
        plan = rules.plan_at(inputs, fraction)
        if plan.headroom_bytes >= needed_headroom_bytes(inputs, plan.activation_peak_bytes):
            return fraction
    return LOWEST


def shortfall_sentence(inputs: PlanInputs, plan: MemoryPlan) -> str | None:
    """Why the plan cannot run; None when it can. A given fraction may eat into the margin, a chosen one may not."""
    asked = inputs.context_length_tokens
    left = gib(plan.free_at_start_bytes)
    if plan.kv_pool_bytes == 0:
        of_state = f" and {gib(plan.linear_state_bytes)} of linear state" if plan.linear_state_bytes else ""
        return f"{gib(plan.weight_bytes)} of weights{of_state} leave nothing of {plan.mem_fraction:g} × {left} for the KV cache"
    there = f"{gib(plan.kv_pool_bytes)} are there: {plan.sequence_tokens:,} tokens at most"
    if asked and plan.sequence_tokens < asked:
        return f"a context of {asked:,} tokens needs {gib(asked * plan.kv_bytes_per_token)} of KV cache, {there}"
    if plan.context_length_tokens < 1:
        return f"a KV cache of {gib(plan.kv_pool_bytes)} holds no useful context: 1,024 tokens and some kept free are the least"
    needed = needed_headroom_bytes(inputs, plan.activation_peak_bytes)
    enough = max(plan.activation_peak_bytes, round(1.5 * inputs.oom_headroom_bytes)) if inputs.mem_fraction is not None else needed
    if plan.headroom_bytes < enough:
        why = f"a prefill chunk of {inputs.chunk:,} tokens peaks at {gib(plan.activation_peak_bytes)}"
        if inputs.oom_headroom_bytes and enough > plan.activation_peak_bytes * (1 + inputs.margin):
            why = f"{gib(inputs.oom_headroom_bytes)} were not enough before"
        return f"{gib(max(0, plan.headroom_bytes))} of headroom at {plan.mem_fraction:g} are less than {gib(enough)}: {why}"
    if plan.context_length_tokens < inputs.min_context_tokens:
        return f"{plan.context_length_tokens:,} tokens of context fit at {plan.mem_fraction:g}, {inputs.min_context_tokens:,} are wanted"
    return None


def _table(inputs: PlanInputs, rules: EngineRules, chosen: float) -> tuple[TableRow, ...]:
    """What each fraction gives, the chosen one among them."""
    return tuple(_row(inputs, rules.plan_at(inputs, fraction)) for fraction in sorted({*TABLE_FRACTIONS, chosen}, reverse=True))


def _row(inputs: PlanInputs, plan: MemoryPlan) -> TableRow:
    free = replace(inputs, mem_fraction=None)  # a row is judged as a choice would be
    return TableRow(
        plan.mem_fraction, plan.kv_tokens, plan.headroom_bytes, plan.context_length_tokens, shortfall_sentence(free, plan) is None
    )


def tokens_per_step(inputs: PlanInputs, rules: EngineRules, fraction: float) -> int:
    """What 0.01 of the fraction costs in tokens."""
    return rules.plan_at(inputs, fraction).kv_tokens - rules.plan_at(inputs, fraction - STEP).kv_tokens


def _reason(inputs: PlanInputs, rules: EngineRules, plan: MemoryPlan, *, given: bool) -> str:
    fraction, peak = plan.mem_fraction, gib(plan.activation_peak_bytes)
    step = tokens_per_step(inputs, rules, fraction)
    costs = f" Each 0.01 is {step:,} tokens." if step > 0 else ""
    context = _context_words(inputs, plan)
    if given:
        return f"{fraction:g} was given; its headroom of {gib(plan.headroom_bytes)} covers the prefill peak of {peak}. {context}{costs}"
    needed = needed_headroom_bytes(inputs, plan.activation_peak_bytes)
    covers = f"the prefill peak of {peak} with {inputs.margin:.0%} to spare"
    if inputs.oom_headroom_bytes and needed > plan.activation_peak_bytes * (1 + inputs.margin):
        covers = f"half as much again as the {gib(inputs.oom_headroom_bytes)} that were not enough"
    words = f"{fraction:g} is the highest fraction whose headroom ({gib(plan.headroom_bytes)}) covers {covers}"
    if fraction >= inputs.red_line:
        words += ", and the red line"
    else:
        above = rules.plan_at(inputs, round(fraction + STEP, 4))
        words += f"; {above.mem_fraction:g} would leave {gib(max(0, above.headroom_bytes))}"
    return f"{words}. {context}{costs}"


def _context_words(inputs: PlanInputs, plan: MemoryPlan) -> str:
    context, pool = f"{plan.context_length_tokens:,}", f"{plan.kv_tokens:,}"
    if inputs.context_length_tokens is not None:
        return f"The context of {context} was given; the KV cache holds {pool} tokens."
    if plan.context_length_tokens == inputs.model.max_context_tokens:
        return f"The context of {context} is the model's own limit; the KV cache holds {pool} tokens."
    return f"The context of {context} is the largest multiple of 1,024 under the {pool} tokens of the KV cache with some kept free."


def _warnings(inputs: PlanInputs, plan: MemoryPlan) -> tuple[str, ...]:
    said = []
    if inputs.features_off >= DIRECT and (why := why_off(inputs.gpu, inputs.tensor_parallel)):
        said.append(why)
    planned = 1 - (plan.headroom_bytes - plan.activation_peak_bytes) / inputs.gpu.total_bytes
    if plan.mem_fraction > inputs.red_line:
        said.append(f"{plan.mem_fraction:g} is over the red line of {inputs.red_line:g}")
    if planned > WARN_SHARE:
        said.append(f"{planned:.0%} of the card are spoken for at the peak; engines have been lost above {WARN_SHARE:.0%}")
    if plan.headroom_bytes < needed_headroom_bytes(inputs, plan.activation_peak_bytes):
        said.append(f"the headroom leaves less than {inputs.margin:.0%} over the prefill peak")
    if inputs.running * plan.context_length_tokens > plan.kv_tokens:
        together = max(1, plan.kv_tokens // max(1, plan.context_length_tokens))
        said.append(f"{inputs.running} sequences may run at once, {together} of the full context fit the KV cache together")
    return tuple(said)
