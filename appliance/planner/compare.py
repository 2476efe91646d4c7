"""Planned against measured, term by term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.core.plan import MemoryPlan
from appliance.planner.engines import rules_of
from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.startup_log import StartupLog, as_started, measured_terms


@dataclass(frozen=True, slots=True)
class ComparedTerm:
    """One term; `unit` is "bytes" or "tokens"."""

    name: str
    planned: int
    measured: int
    unit: str

    @property
    def off(self) -> float:
        """Relative error of the plan: +0.02 is two per cent too much."""
        return self.planned / self.measured - 1 if self.measured else 0.0


def compare(inputs: PlanInputs, log: StartupLog) -> tuple[ComparedTerm, ...]:
    """What a plan without the log would have said, against the log; terms that the log does not have are left out.

    Args:
        inputs: without measured terms; the setting (fraction, context, dtype) is taken from the log where it is printed.
    """
    started = replace(as_started(inputs, log), measured=Measured())
    rules = rules_of(started.engine)
    resolved = rules.resolve(started)
    fraction = resolved.mem_fraction
    planned = rules.plan_at(resolved, 0.9 if fraction is None else fraction)
    given_memory = _with_measured_terms(started, log)
    pairs = [
        (name, _size(planned, name), size)
        for name, size in _measured_sizes(measured_terms(log))
        if size is not None and (name not in _NEED_FRACTION or fraction is not None)
    ]
    rows = [ComparedTerm(name, mine, theirs, "bytes") for name, mine, theirs in pairs if mine is not None]
    tokens = log.size("kv_tokens")
    if tokens and fraction is not None:
        rows.append(ComparedTerm("KV tokens", planned.kv_tokens, tokens, "tokens"))
    if tokens and given_memory is not None:
        rows.append(ComparedTerm("KV tokens, given the measured terms", given_memory.kv_tokens, tokens, "tokens"))
    return tuple(rows)


_NEED_FRACTION = ("KV pool", "headroom")


def _measured_sizes(measured: Measured) -> tuple[tuple[str, int | None], ...]:
    return (
        ("free at start", measured.free_at_start_bytes),
        ("weights", measured.weight_bytes),
        ("non-torch", measured.non_torch_bytes),
        ("linear state", measured.linear_state_bytes),
        ("workspaces and graphs", measured.fixed_bytes),
        ("CUDA graphs", measured.fixed_bytes),
        ("prefill peak", measured.activation_peak_bytes),
        ("compute buffer", measured.activation_peak_bytes),
        ("KV pool", measured.kv_pool_bytes),
        ("KV cache", measured.kv_pool_bytes),
    )


def _size(plan: MemoryPlan, name: str) -> int | None:
    return next((term.size_bytes for term in plan.terms if term.name == name), None)


def _with_measured_terms(started: PlanInputs, log: StartupLog) -> MemoryPlan | None:
    """The engine's arithmetic on its own figures: what is left is the planner's error and the two printed digits."""
    measured = measured_terms(log)
    enough = measured.kv_pool_bytes is not None or (measured.free_at_start_bytes is not None and measured.weight_bytes is not None)
    if not enough or (started.mem_fraction is None and measured.kv_pool_bytes is None):
        return None
    rules = rules_of(started.engine)
    resolved = rules.resolve(replace(started, measured=measured))
    return rules.plan_at(resolved, started.mem_fraction if started.mem_fraction is not None else 0.9)
