"""Public start-up logs that were found after the formulas had been made: what the planner says of each, without anything fitted to it.

Where a row stands in public is beside it. Judged by the promises of docs/budget.md: tokens from a known pool within 0.5 %, from the card
and the configuration within 5 %, a term by itself within what is beside it.
"""

from __future__ import annotations

from typing import Any

import pytest

from appliance.core.plan import MemoryPlan, ModelFacts
from appliance.core.units import GIB, MIB
from tests.unit.planner import shapes

Setting = dict[str, Any]


def qwen3(**changes: Any) -> ModelFacts:
    """Of the dense family unless changed."""
    own: Setting = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151_936,
                    "max_position_embeddings": 40_960, "num_key_value_heads": 8}  # fmt: skip
    return shapes.facts(shapes.dense(**(own | changes)))


MOE: Setting = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
                "num_experts_per_tok": 8}  # fmt: skip
QWEN3_1_7B = qwen3(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True)
QWEN3_30B = qwen3(**MOE, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768,
                  max_position_embeddings=262_144)  # fmt: skip
QWEN3_235B = qwen3(**MOE, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=94, num_attention_heads=64,
                   moe_intermediate_size=1536, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})  # fmt: skip
QWEN2_5_3B = qwen3(model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36,
                   num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
QWEN2_5_7B_AWQ = qwen3(model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=3584, intermediate_size=18_944,
                       num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152_064,
                       quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})  # fmt: skip
LLAMA = shapes.facts(shapes.dense())
HYBRID_35B = shapes.facts(shapes.hybrid_35b())
MISTRAL_7B = shapes.facts(shapes.dense(model_type="mistral", architectures=["MistralForCausalLM"], vocab_size=32_768,
                                       max_position_embeddings=32_768))  # fmt: skip
GPT_OSS_120B = shapes.facts(
    shapes.dense(model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
                 num_attention_heads=64, head_dim=64, vocab_size=201_088, sliding_window=128, num_local_experts=128, num_experts_per_tok=4,
                 quantization_config={"quant_method": "mxfp4"})
)  # fmt: skip
DEEPSEEK_R1 = shapes.facts(
    shapes.dense(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, intermediate_size=18_432,
                 num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, vocab_size=129_280,
                 max_position_embeddings=163_840, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
                 n_shared_experts=1, first_k_dense_replace=3,
                 kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, num_nextn_predict_layers=1,
                 quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
)  # fmt: skip
GEMMA_3_4B = shapes.facts(
    {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 1024,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16"}}
)  # fmt: skip


def planned(model: ModelFacts, gpu: str, engine: str, fraction: float = 0.9, **setting: Any) -> MemoryPlan:
    """The chain."""
    return shapes.plan_of(shapes.inputs(model, gpu, engine, **setting), fraction)


def term(plan: MemoryPlan, name: str) -> int:
    """One link's bytes."""
    return next(link.size_bytes for link in plan.terms if link.name == name)


FROM_POOL = [
    ("vllm#33263", QWEN3_1_7B, "24GiB", "vllm", 18.78,
     {"engine_version": "0.14.0", "context_length_tokens": 1024, "max_running": 1}, 175_856),
    ("club-3090#612", HYBRID_35B, "rtx5090", "vllm", 5.98,
     {"engine_version": "0.24.0", "kv_dtype": "fp8", "context_length_tokens": 131_072, "max_running": 1, "prefill_chunk_tokens": 8192},
     567_978),
    ("vllm#10517 at 29,000", LLAMA, "23.58GiB", "vllm", 2.89, {"engine_version": "0.6.4", "context_length_tokens": 29_000}, 23_648),
    ("vllm#21348, SGLang TP 4", QWEN3_235B, "h100", "sglang", 16.46, {"engine_version": "0.4.9", "tensor_parallel": 4}, 367_404),
    ("sglang#18263", QWEN3_30B, "288GiB", "sglang", 152.88, {"engine_version": "0.5.9"}, 1_669_816),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "engine", "gib", "setting", "tokens"), [pytest.param(*row[1:], id=row[0]) for row in FROM_POOL])
def test_tokens_follow_from_a_known_pool(model: ModelFacts, gpu: str, engine: str, gib: float, setting: Setting, tokens: int) -> None:
    """Within 0.5 %, most of which is the two printed digits."""
    assert planned(model, gpu, engine, measured={"kv_pool": gib}, **setting).kv_tokens == pytest.approx(tokens, rel=0.005)


def test_ranks_that_differ_are_the_one_row_that_is_further_off() -> None:
    """vllm#21348: 8.11 GiB are printed by one of four workers, the 178,880 tokens are those of the worker that had least: 1.1 % fewer."""
    plan = planned(QWEN3_235B, "h100", "vllm", measured={"kv_pool": 8.11}, engine_version="0.9.2", tensor_parallel=4,
                   context_length_tokens=40_960)  # fmt: skip
    assert plan.kv_tokens == pytest.approx(178_880, rel=0.012)


def test_sglangs_budget_is_the_fraction_of_what_was_free_less_the_weights() -> None:
    """sglang#18263, 0.911 of 287.18 GiB: 204.63 printed; the weights by themselves within half a per cent."""
    setting: Setting = {"engine_version": "0.5.9", "measured": {"free_at_start": 287.18, "weight": 56.98}}
    assert planned(QWEN3_30B, "288GiB", "sglang", 0.911, **setting).kv_pool_bytes / GIB == pytest.approx(204.63, abs=0.02)
    assert planned(QWEN3_30B, "288GiB", "sglang", 0.911).weight_bytes / GIB == pytest.approx(56.98, rel=0.005)


END_TO_END = [
    ("vllm#10517 at 29,000", LLAMA, "23.58GiB", "vllm", 0.90,
     {"engine_version": "0.6.4", "context_length_tokens": 29_000, "prefill_chunk_tokens": 29_000, "max_running": 256}, 23_648),
    ("aisimulate#263, DeepSeek-R1 on 8 H200", DEEPSEEK_R1, "h200", "sglang", 0.82,
     {"engine_version": "0.5.9", "tensor_parallel": 8, "prefill_chunk_tokens": 8192, "max_running": 64}, 509_000),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "engine", "fraction", "setting", "tokens"), [pytest.param(*r[1:], id=r[0]) for r in END_TO_END])
def test_tokens_follow_from_card_and_configuration(
    model: ModelFacts, gpu: str, engine: str, fraction: float, setting: Setting, tokens: int
) -> None:
    """Within 5 %."""
    assert planned(model, gpu, engine, fraction, **setting).kv_tokens == pytest.approx(tokens, rel=0.05)


def test_the_free_memory_of_eight_ranks() -> None:
    """sglang#11716: 137.29 GiB on each of eight H200, whose communicators take 2 GiB."""
    assert planned(DEEPSEEK_R1, "h200", "sglang", tensor_parallel=8).free_at_start_bytes / GIB == pytest.approx(137.29, rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "setting", "gib"),
    [
        pytest.param(LLAMA, "l40s", {"engine_version": "0.8.5"}, 14.9889, id="vllm#17122, Llama-3.1-8B"),
        pytest.param(QWEN2_5_7B_AWQ, "8.00GiB", {"engine_version": "0.7.3"}, 5.2032, id="vllm#13882, Qwen2.5-7B-AWQ"),
    ],
)
def test_weights_from_the_configuration_alone(model: ModelFacts, gpu: str, setting: Setting, gib: float) -> None:
    """Within half a per cent of "Model loading took"."""
    assert planned(model, gpu, "vllm", **setting).weight_bytes / GIB == pytest.approx(gib, rel=0.005)


def test_a_card_that_vllm_refused_is_refused() -> None:
    """vllm#13882: 0.7 of 8 GiB, 5.20 of weights, 1.42 of activations: -1.05 GiB for the KV cache."""
    plan = planned(QWEN2_5_7B_AWQ, "8.00GiB", "vllm", 0.7, engine_version="0.7.3", context_length_tokens=4096, max_running=256)
    assert plan.kv_pool_bytes == 0


def test_a_thousand_sequences_cost_what_the_profile_found() -> None:
    """vllm#21489, gemma-3-4b on a B200 with its 1,024 sequences: a peak of 9.96 GiB, nearly all of it the sampler's."""
    peak = planned(GEMMA_3_4B, "b200", "vllm", engine_version="0.10.0", max_running=1024).activation_peak_bytes
    assert peak / GIB == pytest.approx(9.96, rel=0.05)


@pytest.mark.parametrize(
    ("model", "setting", "mib"),
    [
        pytest.param(QWEN2_5_3B, {"context_length_tokens": 4096}, 144.0, id="LLamaSharp#1099"),
        pytest.param(MISTRAL_7B, {"context_length_tokens": 2048}, 256.0, id="logdetective#106 at 2,048"),
        pytest.param(MISTRAL_7B, {"context_length_tokens": 32_768}, 4096.0, id="logdetective#106 at 32,768"),
        pytest.param(GPT_OSS_120B, {"context_length_tokens": 131_072, "prefill_chunk_tokens": 1024}, 4608.0 + 45.0,
                     id="ollama#16480, one sequence"),
    ],
)  # fmt: skip
def test_llama_cpps_cache_is_exact(model: ModelFacts, setting: Setting, mib: float) -> None:
    """ "KV buffer size", the sliding layers' included."""
    assert planned(model, "288GiB", "llamacpp", **setting).kv_pool_bytes / MIB == mib


def test_llama_cpps_compute_buffer_is_not_planned_too_small() -> None:
    """LLamaSharp#1099: 300.75 MiB are logits and mask; the plan has 32 MiB more for what flash attention takes beside it."""
    peak = planned(QWEN2_5_3B, "16GiB", "llamacpp", context_length_tokens=4096).activation_peak_bytes / MIB
    assert 300.75 <= peak <= 300.75 + 32


def test_the_drafter_of_a_mixture_of_experts_is_a_layer_of_experts() -> None:
    """DeepSeek-R1's has 11.5 thousand million parameters in 8 bits; counted with the first layers' density it was less than nothing."""
    assert DEEPSEEK_R1.draft_weight_bytes / 1e9 == pytest.approx(11.6, rel=0.05)
    assert (DEEPSEEK_R1.weight_bytes - DEEPSEEK_R1.draft_weight_bytes) / 1e9 == pytest.approx(671 + 1.9, rel=0.01)
