"""Weight bytes without tensors: counted against transformers' own models, and against what engines printed."""

from typing import Any

import pytest

from appliance.core.units import GIB
from appliance.planner.model_config import facts_from_config
from tests.unit.planner import shapes

MOE = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
COUNTED = [
    ("llama", shapes.dense(), 8_030_261_248),
    ("qwen3", shapes.dense(model_type="qwen3", hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                           head_dim=128, vocab_size=151936), 32_762_123_264),
    ("qwen3_moe", shapes.dense(model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4, head_dim=128,
                               vocab_size=151936, **MOE), 30_532_122_624),
    ("mistral", shapes.dense(model_type="mistral", hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, head_dim=128,
                             vocab_size=131072), 23_572_403_200),
    ("qwen2, tied", shapes.dense(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True), 494_032_768),
    ("gpt_oss", shapes.dense(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
                             head_dim=64, vocab_size=201088, num_local_experts=32, num_experts_per_tok=4), 20_914_757_184),
    ("gemma3", shapes.dense(model_type="gemma3_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, head_dim=128,
                            num_key_value_heads=16, vocab_size=262208, tie_word_embeddings=True), 27_009_346_304),
    ("deepseek_v2, latent", shapes.dense(model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
                                         num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, qk_rope_head_dim=64,
                                         qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64,
                                         n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, vocab_size=102400),
     15_706_484_224),
    ("qwen3_5, hybrid with vision", shapes.hybrid_27b(quantised=False), 27_356_728_560),
]  # fmt: skip


@pytest.mark.parametrize(("config", "parameters"), [pytest.param(config, count, id=name) for name, config, count in COUNTED])
def test_parameters_are_counted_as_transformers_counts_them(config: dict[str, Any], parameters: int) -> None:
    """Within 0.05 %: biases and a few norms are left out. The counts are transformers 5.24's on the meta device."""
    model = facts_from_config(config, "model")
    assert (model.weight_bytes - model.draft_weight_bytes) / 2 == pytest.approx(parameters, rel=5e-4)


def test_a_quantised_hybrid_weighs_what_it_was_measured_to_weigh() -> None:
    """AutoRound W4A16: linear layers in 4.16 bits, embedding, output, vision and the two small projections in 16: 17.67 GiB printed."""
    model = shapes.facts(shapes.hybrid_27b())
    assert (model.weight_bytes - model.draft_weight_bytes) / GIB == pytest.approx(17.67, rel=0.02)
    assert model.quantisation == "auto-round 4 bit, groups of 128"
    assert model.draft_weight_bytes / GIB == pytest.approx(0.79, abs=0.01)
    assert model.vision_weight_bytes / 2 == pytest.approx(460_730_096, rel=2e-3)


@pytest.mark.parametrize(
    ("quantisation", "gib"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 5.33),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 5.33),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, 4.60),
        ({"quant_method": "fp8"}, 8.46),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 5.31),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 5.61),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}}}, 5.31),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8.47),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn"]}, 7.19),
    ],
)  # fmt: skip
def test_each_quantisation_has_its_width(quantisation: dict[str, Any], gib: float) -> None:
    """Llama-3.1-8B: 6.98 G numbers in linear layers, 2 × 0.525 G in embedding and output."""
    model = shapes.facts(shapes.dense(quantization_config=quantisation))
    assert model.weight_bytes / GIB == pytest.approx(gib, rel=0.01)


def test_experts_alone_are_quantised_in_mxfp4() -> None:
    """gpt-oss-20b: 12.8 GiB of checkpoint."""
    config = shapes.dense(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
                          head_dim=64, vocab_size=201088, num_local_experts=32, num_experts_per_tok=4,
                          quantization_config={"quant_method": "mxfp4"})  # fmt: skip
    assert shapes.facts(config).weight_bytes / GIB == pytest.approx(12.8, rel=0.01)
