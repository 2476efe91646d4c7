"""The rungs of this configuration: what the owner wants, and below it what the planner says asks for less."""

from __future__ import annotations

from dataclasses import replace

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.core.errors import ApplianceError
from appliance.core.plan import GpuFacts, MemoryPlan, ModelFacts, Rung
from appliance.planner.calibration import Calibration, calibrated
from appliance.planner.card_ladder import card_ladder
from appliance.planner.engines import rules_of
from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.ladder import native_ladder
from appliance.planner.model_files import model_facts

_ON_CARDS = ("sglang", "vllm")
"""Engines with a fraction of a card's memory and features to switch off."""


def ladder_of(backend: Backend, config: Config, known: Calibration | None = None, room_bytes: int | None = None) -> tuple[Rung, ...]:
    """Index 0 is what is configured; each later one asks for less. Rungs that the engine could not tell apart are one.

    Args:
        known: what earlier starts measured.
        room_bytes: memory that an engine finds; with it the built-in engine's rungs have their plans.
    """
    first = backend.first_rung(config)
    different: dict[tuple[object, ...], Rung] = {}
    below = card_ladder if backend.name in _ON_CARDS else native_ladder
    for rung in (first, *below(first)):
        different.setdefault(backend.told(config, rung), rung)
    rungs = tuple(replace(rung, index=index) for index, rung in enumerate(different.values()))
    if backend.name != "native" or not room_bytes:
        return rungs
    try:
        facts = model_facts(config.model.path)
        return tuple(replace(rung, plan=_plan(rung, config, facts, known, room_bytes)) for rung in rungs)
    except ApplianceError:
        return rungs  # no such model: whoever starts it says so


def _plan(rung: Rung, config: Config, facts: ModelFacts, known: Calibration | None, room_bytes: int) -> MemoryPlan:
    """The built-in engine's chain for one rung, with the pool that is configured."""
    inputs = PlanInputs(
        facts,
        GpuFacts("this machine", room_bytes, room_bytes),
        "native",
        mem_fraction=config.budget.mem_fraction,
        context_length_tokens=rung.context_length_tokens or None,
        prefill_chunk_tokens=rung.prefill_chunk_tokens,
        max_running=rung.max_running,
        block_tokens=config.engine.block_tokens,
        measured=Measured(kv_pool_bytes=config.engine.kv_pool_bytes, source="as configured"),
    )
    rules = rules_of("native")
    resolved = rules.resolve(inputs if known is None else calibrated(inputs, known))
    plan = rules.plan_at(resolved, config.budget.mem_fraction)
    if plan.context_length_tokens <= plan.kv_tokens:
        return plan
    return rules.plan_at(replace(resolved, context_length_tokens=plan.kv_tokens), config.budget.mem_fraction)  # the engine cuts it so
