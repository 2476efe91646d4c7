"""SGLang's arithmetic by version, against the article's rows and public logs."""

from dataclasses import replace
from typing import Any

import pytest

from appliance.core.units import GIB, MIB
from appliance.planner import sglang
from appliance.planner.inputs import PlanInputs
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())
TERMS = {"weight": 17.67, "linear_state": 0.73}


def _article(**changes: Any) -> PlanInputs:
    """The article's box: a 24 GiB 3090, SGLang 0.5.17, 8-bit KV, weights and state as its engine printed them."""
    return shapes.inputs(HYBRID, "24GiB", "sglang", **{"engine_version": "0.5.17", "kv_dtype": "fp8_e4m3", "measured": TERMS, **changes})


@pytest.mark.parametrize(("fraction", "tokens", "headroom_gib"), [(0.95, 120_079, 0.65), (0.93, 105_256, 1.09), (0.92, None, 1.35)])
def test_the_articles_rows_come_out(fraction: float, tokens: int | None, headroom_gib: float) -> None:
    """Tokens within 1 % of what the engine printed, headroom within 0.05 GiB."""
    worked_out = shapes.plan_of(_article(), fraction)
    assert worked_out.kv_bytes_per_token == 32_768
    assert tokens is None or worked_out.kv_tokens == pytest.approx(tokens, rel=0.01)
    assert worked_out.headroom_bytes / GIB == pytest.approx(headroom_gib, abs=0.05)


@pytest.mark.parametrize("card", ["24GiB", "rtx3090", "23.56GiB"])
def test_the_articles_choice_is_made_again(card: str) -> None:
    """At least 100k wanted, and it ran out of memory with 0.65 GiB: 0.93 and 102,400."""
    asked = replace(_article(), gpu=shapes.gpu_facts(card), min_context_tokens=100_000, oom_headroom_bytes=round(0.65 * GIB))
    choice = plan(asked)
    assert (choice.plan.mem_fraction, choice.plan.context_length_tokens) == (0.93, 102_400)
    assert "0.94 would leave" in choice.reason


def test_without_a_history_the_setting_that_crashed_is_not_chosen() -> None:
    """The article's first start had 0.65 GiB of headroom; the planner would not have begun there."""
    choice = plan(_article())
    assert choice.plan.mem_fraction <= 0.93
    assert choice.plan.headroom_bytes > 0.66 * GIB


@pytest.mark.parametrize(("fraction", "tokens"), [(0.95, 120_079), (0.93, 105_256)])
def test_without_measured_terms_the_same_box_is_estimated_within_five_per_cent(fraction: float, tokens: int) -> None:
    """Weights from the configuration and its quantisation, slots and their dtype assumed and said."""
    asked = _article(measured={})
    assert shapes.plan_of(asked, fraction).kv_tokens == pytest.approx(tokens, rel=0.05)
    said = " ".join(sglang.resolve(asked).assumptions)
    assert "9 linear-state slots" in said
    assert "bfloat16" in said


def test_a_state_slot_is_what_the_engine_allocates() -> None:
    """146.8 MiB in float32 and 74.8 in bfloat16 a slot, halved by two cards; ten slots are the 0.70 + 0.03 GiB of the article."""
    wide = sglang.resolve(_article(measured={}, state_dtype="float32"))
    narrow = sglang.resolve(_article(measured={}))
    assert sglang.state_slot_bytes(wide) == 48 * 3_207_168
    assert sglang.state_slot_bytes(replace(wide, tensor_parallel=2)) == 24 * 3_207_168
    assert sglang.linear_state(narrow, (0, 5, 17)).size_bytes / GIB == pytest.approx(0.73, abs=0.005)


def test_the_padding_slot_and_the_drafter_move_into_the_budget_after_0_5_9() -> None:
    """0.5.9 allocates both and budgets neither; later versions take them off the pool."""
    drafted = _article(measured={}, draft_tokens=4)
    old, new = (shapes.plan_of(replace(drafted, engine_version=version), 0.9) for version in ("0.5.9", "0.5.17"))
    assert old.kv_bytes_per_token == 32_768
    assert new.kv_bytes_per_token == 32_768 * 17 // 16
    assert old.kv_tokens > new.kv_tokens
    assert old.headroom_bytes < new.headroom_bytes


def test_0_5_23_keeps_100_mib_for_images_off_the_pool() -> None:
    """Not when the tower is not loaded."""
    pools = [
        shapes.plan_of(replace(_article(), engine_version=version, language_only=language_only), 0.9).kv_pool_bytes
        for version, language_only in (("0.5.17", False), ("0.5.23", False), ("0.5.23", True))
    ]
    assert pools[0] - pools[1] == 100 * MIB
    assert pools[2] == pools[0]


def test_a_granite_hybrid_start_is_reproduced_from_its_free_memory() -> None:
    """A public 0.5.9 log of a Mamba 2 hybrid: 15.24 GiB free, 5.98 of weights, 38 slots: state 2.74 + 0.03, 399,740 tokens."""
    config = shapes.dense(architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid", hidden_size=2048,
                          num_hidden_layers=40, head_dim=64, layer_types=(["mamba"] * 9 + ["attention"]) * 4, mamba_n_heads=64,
                          mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4)  # fmt: skip
    asked = shapes.inputs(shapes.facts(config), "16GiB", "sglang", engine_version="0.5.9", state_dtype="float32", state_slots=38,
                          measured={"free_at_start": 15.24, "weight": 5.98})  # fmt: skip
    worked_out = shapes.plan_of(asked, 0.77)
    assert 39 * sglang.state_slot_bytes(sglang.resolve(asked)) / GIB == pytest.approx(2.74 + 0.034, abs=0.01)
    assert worked_out.kv_bytes_per_token == 8192
    assert worked_out.kv_tokens == pytest.approx(399_740, rel=0.005)


@pytest.mark.parametrize(
    ("config", "tp", "dtype", "cell"),
    [
        (shapes.dense(), 1, "auto", 131_072),
        (shapes.dense(), 2, "fp8_e5m2", 32_768),
        (shapes.dense(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64), 16, "auto", 2 * 128 * 2 * 80),  # replicated heads
        (shapes.dense(kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=27), 2, "auto", 576 * 27 * 2),  # latent: not shared
        (shapes.dense(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, num_hidden_layers=61), 1, "fp8_e4m3", (656 + 132) * 61),
        (shapes.hybrid_27b(), 2, "auto", 32_768),
        (shapes.dense(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], num_hidden_layers=62, num_key_value_heads=16,
                      head_dim=128, sliding_window=1024, sliding_window_pattern=6), 1, "auto", 507_904),  # no pool of its own
        (shapes.dense(model_type="gpt_oss", architectures=["GptOssForCausalLM"], num_hidden_layers=24, head_dim=64, sliding_window=128),
         1, "auto", round(12 * 2048 + 0.8 * 12 * 2048)),
    ],
)  # fmt: skip
def test_a_token_costs_what_the_pool_configurator_says(config: dict[str, Any], tp: int, dtype: str, cell: int) -> None:
    """Grouped, latent, sparse, hybrid and sliding models, on one rank and on several."""
    asked = shapes.inputs(shapes.facts(config), "h100", "sglang", tensor_parallel=tp, kv_dtype=dtype)
    assert sglang.cell_bytes(sglang.resolve(asked), (0, 5, 17)) == pytest.approx(cell, abs=1)


def test_a_gemma4_pool_is_split_as_a_public_log_shows() -> None:
    """gemma-4-26b-a4b printed 36.69 GiB for 171,008 sliding and 213,761 full tokens: share 0.8, 8 × 256 and 2 × 512 wide heads."""
    config = shapes.gemma4(
        num_hidden_layers=30, num_global_key_value_heads=2, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5
    )
    cell = sglang.cell_bytes(sglang.resolve(shapes.inputs(shapes.facts(config), "h200", "sglang")), (0, 5, 17))
    assert 213_761 * cell / GIB == pytest.approx(36.69, rel=0.005)
    assert int(213_761 * sglang.SLIDING_SHARE) == 171_008


def test_captured_batches_are_those_of_the_engine() -> None:
    """1, 2, 4, 8, 12, 16, 24 for a limit of 24; the limit itself is always captured."""
    assert [sglang.captured_batches(limit) for limit in (1, 3, 4, 24, 48)] == [1, 3, 3, 7, 10]
