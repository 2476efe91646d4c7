"""What `appliancectl setup` writes for a model: the planner's numbers for this machine, with the planner's own reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.config import Config
from appliance.core.errors import BudgetError
from appliance.core.units import MIB, format_bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """Keys for the drop-in, and the sentence that says why."""

    values: dict[str, object]
    sentence: str


def planned(model: Path, config: Config) -> Planned:
    """The KV pool of the built-in engine for this model, from the memory that is free now.

    Raises:
        BudgetError: the model does not fit; with both numbers, and what would make it fit.
        ModelError: the folder cannot be read as a model.
    """
    from appliance.cli.plan_facts import AUTO, find_gpu
    from appliance.planner.choose import attempt
    from appliance.planner.inputs import PlanInputs, Shortfall
    from appliance.planner.model_files import model_facts

    inputs = PlanInputs(
        model_facts(model), find_gpu(AUTO, "native"), "native", max_running=config.engine.max_running, red_line=config.budget.mem_fraction,
        swap_bytes=config.engine.swap_bytes,
    )  # fmt: skip
    found = attempt(inputs)
    if isinstance(found, Shortfall):
        raise BudgetError(
            f"{model.name} does not fit into this machine: {found.sentence}",
            hint=f"appliancectl plan --engine native --model {model} says more",
        )
    pool = max(MIB, found.plan.kv_pool_bytes // MIB * MIB)
    sentence = (
        f"a KV pool of {format_bytes(pool)}: {found.plan.kv_tokens:,} tokens, context {found.plan.context_length_tokens:,}; {found.reason}"
    )
    return Planned({"model.path": str(model), "engine.kv_pool_bytes": pool}, sentence)
