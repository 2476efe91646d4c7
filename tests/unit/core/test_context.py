"""How long a context config.json gives: planner and engine say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.core.context import context_tokens
from appliance.engine.models.registry import read_config
from appliance.planner.inputs import PlanInputError
from appliance.planner.model_config import facts_from_config
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

NAMED = 32_768
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NAMED}
CASES: list[tuple[dict[str, Any], int]] = [
    ({}, NAMED),
    ({"rope_scaling": None}, NAMED),
    ({"rope_scaling": YARN}, 131_072),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, 65_536),
    ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, 131_072),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}}, NAMED),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, NAMED),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": NAMED}}, NAMED),
]


def config_of(scaling: dict[str, Any]) -> dict[str, Any]:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 100, "max_position_embeddings": NAMED, **shape, **scaling}


@pytest.mark.parametrize(("scaling", "tokens"), CASES)
def test_planner_and_engine_have_one_rule(scaling: dict[str, Any], tokens: int) -> None:
    """What is planned for is what is served."""
    config = config_of(scaling)
    assert read_config(config).max_context_tokens == tokens
    assert facts_from_config(config, "one").max_context_tokens == tokens


@pytest.mark.parametrize(
    "scaling", ["yarn", [], {"type": "yarn"}, {"type": "yarn", "factor": "4"}, {"type": "yarn", "factor": float("nan")}]
)
def test_a_scaling_that_is_none_changes_nothing(scaling: object) -> None:
    """Who serves such a model says what is wrong with it."""
    given = {"type": "yarn", **scaling} if isinstance(scaling, dict) else scaling
    assert context_tokens(NAMED, {"rope_scaling": given}) == NAMED


def test_sglang_is_planned_with_what_is_named() -> None:
    """It refuses more, where vLLM and the built-in engine take it."""
    asked = shapes.inputs(facts_from_config(config_of({"rope_scaling": YARN}), "one"), "24GiB", "sglang")
    assert plan(asked).plan.context_length_tokens == NAMED
    with pytest.raises(PlanInputError, match="exceeds the model's own limit of 32,768"):
        plan(replace(asked, context_length_tokens=100_000))
    assert plan(replace(asked, engine="vllm")).plan.context_length_tokens == 131_072
