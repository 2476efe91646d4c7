"""The rungs of this configuration: what the owner wants, and below it what the planner says asks for less."""

from __future__ import annotations

from dataclasses import replace

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.core.errors import ApplianceError
from appliance.core.plan import GpuFacts, MemoryPlan, ModelFacts, Rung
from appliance.planner.calibration import Calibration, calibrated
from appliance.planner.card_ladder import card_ladder, llamacpp_ladder
from appliance.planner.engines import ENGINES, rules_of
from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.ladder import native_ladder
from appliance.planner.model_files import model_facts

_BELOW = {"sglang": card_ladder, "vllm": card_ladder, "llamacpp": llamacpp_ladder}
"""Engines with more to give up than chunk, sequences and context, or in another order."""


def ladder_of(backend: Backend, config: Config, known: Calibration | None = None, place: GpuFacts | None = None) -> tuple[Rung, ...]:
    """Index 0 is what is configured; each later one asks for less. Rungs that the engine could not tell apart are one.

    Args:
        known: what earlier starts measured.
        place: the card, or for the built-in engine the machine's memory; with it the rungs have their plans.
    """
    first = backend.first_rung(config)
    different: dict[tuple[object, ...], Rung] = {}
    for rung in (first, *_BELOW.get(backend.name, native_ladder)(first)):
        different.setdefault(backend.told(config, rung), rung)
    rungs = tuple(replace(rung, index=index) for index, rung in enumerate(different.values()))
    if backend.name not in ENGINES or place is None:
        return rungs
    try:
        facts = model_facts(config.model.path)
        version = "" if backend.name == "native" else config.engine.version or backend.version
        return tuple(replace(rung, plan=_plan(_inputs(rung, config, facts, place, backend.name, version), known)) for rung in rungs)
    except ApplianceError:
        return rungs  # no such model, or a setting that cannot be: whoever starts it says so


def _inputs(rung: Rung, config: Config, facts: ModelFacts, place: GpuFacts, engine: str, version: str) -> PlanInputs:
    """A rung as the planner takes it; the built-in engine's pool is the owner's."""
    pool = Measured(kv_pool_bytes=config.engine.kv_pool_bytes, source="as configured") if engine == "native" else Measured()
    return PlanInputs(
        facts,
        place,
        engine,
        version,
        mem_fraction=rung.mem_fraction,
        context_length_tokens=rung.context_length_tokens or None,
        kv_dtype=rung.kv_dtype or "auto",
        tensor_parallel=rung.tensor_parallel,
        prefill_chunk_tokens=rung.prefill_chunk_tokens,
        max_running=rung.max_running,
        draft_tokens=rung.draft_tokens,
        state_dtype=rung.state_dtype,
        state_slots=rung.state_slots,
        prefix_cache=rung.prefix_cache,
        block_tokens=config.engine.block_tokens if engine == "native" else rung.block_tokens,
        language_only=rung.language_only,
        features_off=rung.features_off,
        measured=pool,
    )


def _plan(inputs: PlanInputs, known: Calibration | None) -> MemoryPlan:
    """The chain at the rung's own fraction."""
    rules = rules_of(inputs.engine)
    resolved = rules.resolve(inputs if known is None else calibrated(inputs, known))
    fraction = inputs.mem_fraction if inputs.mem_fraction is not None else 0.9
    plan = rules.plan_at(resolved, fraction)
    if 0 < plan.context_length_tokens <= plan.sequence_tokens or not plan.sequence_tokens:
        return plan
    return rules.plan_at(replace(resolved, context_length_tokens=plan.sequence_tokens), fraction)  # an engine takes no more than its pool
