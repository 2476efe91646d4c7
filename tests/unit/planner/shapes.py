"""Published shapes of models, as their config.json says them, and shorthands for inputs. Not a test."""

from __future__ import annotations

from typing import Any

from appliance.core.plan import MemoryPlan, ModelFacts
from appliance.core.units import GIB
from appliance.planner.engines import rules_of
from appliance.planner.gpus import gpu_facts
from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.model_config import facts_from_config

Config = dict[str, Any]


def dense(**changes: Any) -> Config:
    """Llama-3.1-8B unless changed."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | changes


def hybrid_27b(*, quantised: bool = True, vision: bool = True) -> Config:
    """Qwen3.5 to 3.8-27B: 16 full and 48 gated-delta-net layers, in an AutoRound W4A16 build."""
    config: Config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"partial_rotary_factor": 0.25},
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        },
    }
    if vision:
        config["vision_config"] = {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 5120,
        }  # fmt: skip
    if quantised:
        linear = "model.language_model.layers.0.linear_attn."
        config["quantization_config"] = {
            "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
            "extra_config": {linear + "in_proj_a": {"bits": 16}, linear + "in_proj_b": {"bits": 16}},
        }  # fmt: skip
    return config


def hybrid_35b() -> Config:
    """Qwen3.6-35B-A3B: 10 full and 30 linear layers, 256 experts."""
    config = hybrid_27b()
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["text_config"] |= {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    }
    del config["text_config"]["intermediate_size"]
    return config


def gemma4(**changes: Any) -> Config:
    """Gemma-4-12B unless changed: five sliding layers to one wide one, whose heads differ."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_k_eq_v": True,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    } | changes


def facts(config: Config, name: str = "model") -> ModelFacts:
    """ModelFacts of a config."""
    return facts_from_config(config, name)


def inputs(model: ModelFacts, gpu: str, engine: str, **changes: Any) -> PlanInputs:
    """PlanInputs with measured terms in GiB under `measured`."""
    measured = {f"{name}_bytes": round(gib * GIB) for name, gib in changes.pop("measured", {}).items()}
    return PlanInputs(model, gpu_facts(gpu), engine, measured=Measured(**measured), **changes)


def plan_of(asked: PlanInputs, mem_fraction: float) -> MemoryPlan:
    """The chain at one fraction."""
    rules = rules_of(asked.engine)
    return rules.plan_at(rules.resolve(asked), mem_fraction)
