"""Well-known models by name, for a plan before anything was downloaded: 16-bit checkpoints; --weights tells of others."""

from __future__ import annotations

from typing import Any

from appliance.core.errors import ModelError
from appliance.core.plan import ModelFacts
from appliance.planner.model_config import facts_from_config

Config = dict[str, Any]


def _dense(layers: int, hidden: int, wide: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any) -> Config:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(layers: int, hidden: int, wide: int, heads: int, **more: Any) -> Config:
    return _dense(layers, hidden, wide, heads, 8, 151_936, 40_960, model_type="qwen3", architectures=["Qwen3ForCausalLM"], **more)


def _hybrid(layers: int, hidden: int, wide: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> Config:
    text = _dense(layers, hidden, wide, heads, kv_heads, 248_320, 262_144)
    text |= {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 1,
        **more,
    }
    vision = {
        "hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 2304, "out_hidden_size": hidden,
    }  # fmt: skip
    name = "Qwen3_5MoeForConditionalGeneration" if "num_experts" in more else "Qwen3_5ForConditionalGeneration"
    return {"architectures": [name], "tie_word_embeddings": False, "text_config": text, "vision_config": vision}


_HYBRID_27B = _hybrid(64, 5120, 17_408, 24, 4, 48)
_MOE = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

MODELS: dict[str, Config] = {
    "llama-3.1-8b": _dense(32, 4096, 14_336, 32, 8, 128_256, 131_072),
    "llama-3.3-70b": _dense(80, 8192, 28_672, 64, 8, 128_256, 131_072),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25_600, 64),
    "qwen3-30b-a3b": _dense(
        48, 2048, 6144, 32, 4, 151_936, 40_960, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"],
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "mistral-small-24b": _dense(40, 5120, 32_768, 32, 8, 131_072, 131_072, model_type="mistral", architectures=["MistralForCausalLM"]),
    "qwen3-next-80b-a3b": {
        **_hybrid(48, 2048, 5120, 16, 2, 32, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
                  shared_expert_intermediate_size=512)["text_config"],
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151_936,
    },
    "qwen3.5-27b": _HYBRID_27B,
    "qwen3.6-27b": _HYBRID_27B,
    "qwen3.8-27b": _HYBRID_27B,
    "qwen3.6-35b-a3b": _hybrid(40, 2048, 512, 16, 2, 32, **_MOE),
    "gemma-3-27b": _dense(
        62, 5376, 21_504, 32, 16, 262_208, 131_072, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"],
        sliding_window=1024, sliding_window_pattern=6, tie_word_embeddings=True,
    ),
    "gpt-oss-20b": _dense(
        24, 2880, 2880, 64, 8, 201_088, 131_072, model_type="gpt_oss", architectures=["GptOssForCausalLM"], head_dim=64,
        sliding_window=128, num_local_experts=32, num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"},
    ),
    "smollm2-135m": _dense(
        30, 576, 1536, 9, 3, 49_152, 8192, head_dim=64, tie_word_embeddings=True, torch_dtype="bfloat16",
    ),
}  # fmt: skip
"""Name → config.json, from the models' published configurations."""


def known_model(name: str) -> ModelFacts:
    """The facts of a well-known model.

    Raises:
        ModelError: we do not know it.
    """
    short = name.lower().rpartition("/")[2].removesuffix("-instruct").removesuffix("-it")
    if short not in MODELS:
        known = ", ".join(MODELS)
        raise ModelError(f"{name!r} is no model folder, no config.json, no GGUF file and no model that we know", hint=f"known are: {known}")
    return facts_from_config(MODELS[short], short)
