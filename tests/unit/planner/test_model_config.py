"""config.json in the spellings of many families → the same facts."""

from typing import Any

import pytest

from appliance.core.errors import ModelError
from appliance.planner.model_config import facts_from_config, state_bytes_per_layer
from tests.unit.planner import shapes

KINDS = [
    ("dense", shapes.dense(), (32, 0, 0)),
    ("every fourth full", shapes.hybrid_27b(), (16, 0, 48)),
    ("interval without a list", {**shapes.dense(num_hidden_layers=48, linear_num_value_heads=32, linear_num_key_heads=16,
                                               linear_key_head_dim=128, linear_value_head_dim=128, full_attention_interval=4)},
     (12, 0, 36)),
    ("gemma 3 pattern", shapes.dense(model_type="gemma3_text", num_hidden_layers=62, sliding_window=1024), (10, 52, 0)),
    ("gemma 2 alternates", shapes.dense(model_type="gemma2", num_hidden_layers=26, sliding_window=4096), (13, 13, 0)),
    ("gpt-oss list", shapes.dense(num_hidden_layers=4, sliding_window=128,
                                  layer_types=["sliding_attention", "full_attention"] * 2), (2, 2, 0)),
    ("mistral slides everywhere", shapes.dense(model_type="mistral", sliding_window=4096), (0, 32, 0)),
    ("qwen2 keeps its window shut", shapes.dense(model_type="qwen2", sliding_window=4096, use_sliding_window=False), (32, 0, 0)),
    ("kimi counts from one", shapes.dense(num_hidden_layers=4, linear_attn_config={"kda_layers": [1, 2, 3], "num_heads": 32,
                                                                                  "head_dim": 128}), (1, 0, 3)),
    ("nemotron-h string", shapes.dense(model_type="nemotron_h", num_hidden_layers=6, hybrid_override_pattern="M-M*-E",
                                       mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, conv_kernel=4), (1, 0, 2)),
    ("jamba period", shapes.dense(num_hidden_layers=8, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16), (1, 0, 7)),
    ("falcon-h1 has both", shapes.dense(model_type="falcon_h1", num_hidden_layers=4, mamba_n_heads=24, mamba_d_head=64), (4, 0, 4)),
    ("gemma 3n shares its last caches", shapes.dense(model_type="gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=5,
                                                     layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
                                                     sliding_window=512), (1, 4, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "counts"), [pytest.param(config, counts, id=name) for name, config, counts in KINDS])
def test_layers_are_sorted_by_what_they_keep(config: dict[str, Any], counts: tuple[int, int, int]) -> None:
    """(full, sliding, linear)."""
    model = facts_from_config(config, "model")
    assert (model.full_attention_layers, model.sliding_window_layers, model.linear_attention_layers) == counts


def test_a_hybrids_state_is_that_of_the_facts() -> None:
    """3,207,168 bytes a layer: 3,145,728 recurrent in 32 bits and 61,440 of convolution; a drafted step adds a convolution step."""
    linear = shapes.facts(shapes.hybrid_27b()).linear
    assert linear is not None
    assert state_bytes_per_layer(linear) == 3_207_168
    assert state_bytes_per_layer(linear, extra_steps=3) == 3_145_728 + 10_240 * 6 * 2
    assert state_bytes_per_layer(linear, "bfloat16") == 1_572_864 + 61_440


def test_wide_and_sliding_heads_are_told_apart() -> None:
    """Gemma 4: 8 × 256 where it slides, 1 × 512 where it sees everything."""
    model = shapes.facts(shapes.gemma4())
    assert (model.kv_heads, model.head_dim, model.sliding_kv_heads, model.sliding_head_dim) == (1, 512, 8, 256)


def test_the_drafter_and_the_tower_are_parts_of_the_weights() -> None:
    """Named, so that they can be left unloaded."""
    model = shapes.facts(shapes.hybrid_27b())
    assert model.draft_layers == 1
    assert 0 < model.draft_weight_bytes + model.vision_weight_bytes < model.weight_bytes
    assert shapes.facts(shapes.hybrid_27b(vision=False)).vision_weight_bytes == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": True}, "hidden_size is True"),
    ],
)
def test_a_config_that_is_no_language_models_is_refused(changes: dict[str, Any], named: str) -> None:
    """The key and its value are in the sentence."""
    with pytest.raises(ModelError, match=named):
        facts_from_config(shapes.dense(**changes), "model")


def test_odd_values_inside_are_refused_in_words() -> None:
    """No traceback of ours for somebody else's file."""
    with pytest.raises(ModelError, match=r"cannot be worked out|config\.json"):
        facts_from_config(shapes.dense(intermediate_size="wide"), "model")
