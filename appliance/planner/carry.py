"""Measured terms of one setting, carried over to another: measured × worked out for the new one ÷ worked out for the old one."""

from __future__ import annotations

from dataclasses import replace

from appliance.planner.engines import rules_of
from appliance.planner.inputs import PlanInputs

_FIXED_TERMS = ("workspaces and graphs", "CUDA graphs")
"""What `Measured.fixed_bytes` stands for in SGLang's chain and in vLLM's."""
_TERMS = ("linear_state_bytes", "fixed_bytes", "activation_peak_bytes")
"""Those that depend on the chunk, the sequences, or what is switched off."""
_SHARE = 0.9
"""None of them depends on the fraction."""


def carried(before: PlanInputs, after: PlanInputs) -> PlanInputs:
    """The changed setting, of which nothing was measured, with the terms that were measured of the one before. Both are resolved."""
    measured = {name: size for name in _TERMS if (size := getattr(before.measured, name)) is not None}
    if not measured or _dependence(before) == _dependence(after):
        return after
    then, now = _worked_out(before), _worked_out(after)
    terms = {name: round(size * now[name] / then[name]) if then[name] else size for name, size in measured.items()}
    return replace(after, measured=replace(after.measured, **terms))


def _dependence(inputs: PlanInputs) -> tuple[object, ...]:
    return (
        inputs.chunk, inputs.running, inputs.tensor_parallel, inputs.draft_tokens, inputs.features_off, inputs.state_slots,
        inputs.state_dtype, inputs.kv_dtype,
    )  # fmt: skip


def _worked_out(inputs: PlanInputs) -> dict[str, int]:
    formulas = replace(inputs.measured, kv_pool_bytes=None, linear_state_bytes=None, fixed_bytes=None, activation_peak_bytes=None)
    plain = replace(inputs, measured=formulas)
    plan = rules_of(plain.engine).plan_at(plain, _SHARE)
    fixed = sum(term.size_bytes for term in plan.terms if term.name in _FIXED_TERMS)
    return {"linear_state_bytes": plan.linear_state_bytes, "fixed_bytes": fixed, "activation_peak_bytes": plan.activation_peak_bytes}
