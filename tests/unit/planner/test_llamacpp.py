"""llama.cpp's arithmetic against public logs and its own rounding rules."""

from dataclasses import replace
from typing import Any

import pytest

from appliance.core.units import GIB, MIB
from appliance.planner import llamacpp
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())


def _sizes(config: dict[str, Any], context: int, **setting: Any) -> dict[str, float]:
    asked = shapes.inputs(shapes.facts(config), "rtx3090", "llamacpp", context_length_tokens=context, **setting)
    return {term.name: term.size_bytes / MIB for term in shapes.plan_of(asked, 0.99).terms}


def test_the_27b_hybrid_at_215040_is_exact() -> None:
    """IQ4_XS, q8_0: KV 7,140.00 MiB printed; 23,264 MiB used at the peak of a 3090."""
    asked = shapes.inputs(HYBRID, "rtx3090", "llamacpp", kv_dtype="q8_0", context_length_tokens=215_040, measured={"weight": 13.27})
    worked_out = shapes.plan_of(asked, 0.95)
    assert worked_out.kv_pool_bytes == 7140 * MIB
    context = asked.gpu.total_bytes - worked_out.free_at_start_bytes
    used = context + worked_out.weight_bytes + worked_out.linear_state_bytes + worked_out.kv_pool_bytes + worked_out.activation_peak_bytes
    assert used / MIB == pytest.approx(23_264, rel=0.05)
    assert worked_out.fits


@pytest.mark.parametrize(
    ("config", "dtype", "context", "mib"),
    [
        (shapes.dense(), "auto", 8192, 1024.0),
        (shapes.dense(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64), "f16", 4096, 1280.0),
        (shapes.dense(num_hidden_layers=47, num_key_value_heads=4, head_dim=128, hidden_size=2048), "q8_0", 32_768, 1598.0),
        (shapes.dense(num_hidden_layers=40), "q4_0", 4096, 180.0),
        (shapes.dense(), "auto", 1000, 128.0),  # 1000 is padded to 1024
    ],
)
def test_the_cache_is_cells_times_layers(config: dict[str, Any], dtype: str, context: int, mib: float) -> None:
    """ "KV buffer size": 47 layers at q8_0 and 32,768 are the 1,598 MiB of a public two-card log."""
    assert _sizes(config, context, kv_dtype=dtype)["KV cache"] == pytest.approx(mib, rel=1e-4)


def test_the_compute_buffer_of_llama_3_8b_is_the_printed_one() -> None:
    """258.50 MiB at 8,192 and ubatch 512: 250.5 of logits, 8 of mask."""
    assert _sizes(shapes.dense(), 8192)["compute buffer"] == pytest.approx(258.5, rel=0.13)


def test_sliding_layers_keep_a_window_and_a_batch() -> None:
    """gpt-oss: 128 + 512 padded to 768 cells for the sliding layers, the whole context for the others."""
    config = shapes.dense(model_type="gpt_oss", num_hidden_layers=24, head_dim=64, sliding_window=128)
    cells = 12 * 8 * 64 * 2 * 2
    assert _sizes(config, 16_384)["KV cache"] * MIB == pytest.approx(16_384 * cells + 768 * cells)


def test_the_recurrent_state_is_32_bits_wide() -> None:
    """ "RS buffer size" 149.62 MiB a sequence for the 27B hybrid."""
    assert _sizes(shapes.hybrid_27b(), 8192)["linear state"] == pytest.approx(149.62, abs=0.05)
    assert _sizes(shapes.hybrid_27b(), 8192, max_running=4)["linear state"] == pytest.approx(4 * 149.62, abs=0.2)


def test_the_input_embedding_stays_in_host_memory() -> None:
    """Known from a GGUF file; a measured size is taken as it is."""
    model = replace(HYBRID, weight_bytes=14 * GIB, draft_weight_bytes=0, host_weight_bytes=1 * GIB)
    asked = shapes.inputs(model, "rtx3090", "llamacpp")
    assert llamacpp.weights(llamacpp.resolve(asked)).size_bytes == 13 * GIB


def test_the_longest_context_is_searched_for_not_stepped_to() -> None:
    """One more step of 1,024 would leave the compute buffer without its margin."""
    asked = shapes.inputs(HYBRID, "rtx3090", "llamacpp", kv_dtype="q8_0", measured={"weight": 13.27})
    choice = plan(asked)
    longer = shapes.plan_of(replace(asked, context_length_tokens=choice.plan.context_length_tokens + 1024), 0.99)
    assert choice.plan.headroom_bytes >= 1.25 * choice.plan.activation_peak_bytes
    assert longer.headroom_bytes < 1.25 * longer.activation_peak_bytes
