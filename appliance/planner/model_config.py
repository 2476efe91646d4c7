"""config.json → ModelFacts. Pure; what is read from disk comes in as arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from appliance.core.context import context_tokens
from appliance.core.errors import ModelError
from appliance.core.plan import LinearStateFacts, ModelFacts
from appliance.planner.elements import dtype_bytes
from appliance.planner.layer_kinds import BOTH, FULL, LINEAR, SLIDING, layer_kinds, sliding_window_tokens
from appliance.planner.quantisation import Quantisation
from appliance.planner.weights import (
    WeightBytes,
    dense_width,
    estimate,
    expert_count,
    expert_width,
    full_head_dim,
    full_kv_heads,
    head_dim_of,
    kv_head_count,
    mamba2_shape,
    model_dtype,
    shared_width,
)

Config = Mapping[str, Any]

_NEEDED = {"hidden_size": 1 << 20, "num_attention_heads": 1 << 16, "num_hidden_layers": 1 << 14, "vocab_size": 1 << 26}
"""Keys that every language model has, and the most that any could mean."""
_MOST = 1 << 60
_CONV_STATE_BYTES = 2
"""The convolution's state is 16 bits wide in SGLang (SGLANG_MAMBA_CONV_DTYPE) and vLLM (the model's dtype)."""


def facts_from_config(config: Config, name: str, weights: WeightBytes | None = None, *, chat_template: bool = False) -> ModelFacts:
    """The facts of a model.

    Args:
        config: config.json.
        weights: true bytes from the tensors' headers; None: they are worked out from the configuration.

    Raises:
        ModelError: a key that every language model has is missing or no number, or the numbers cannot be those of a model.
    """
    try:
        facts = _facts(config, name, weights, chat_template=chat_template)
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        found = f"config.json: it describes no model that we understand ({type(error).__name__}: {str(error)[:120]})"
        raise ModelError(found, hint="compare it with the one of the model's publisher") from error
    _check_facts(facts)
    return facts


def _facts(config: Config, name: str, weights: WeightBytes | None, *, chat_template: bool) -> ModelFacts:
    text = text_config(config)
    _check(text)
    kinds = layer_kinds(text, int(text["num_hidden_layers"]))
    draft_layers = _draft_layers(config, text)
    size = weights or _estimated(config, text, kinds, draft_layers)
    holding = _without_shared(kinds, text)
    facts = ModelFacts(
        name=name,
        architecture=_architecture(config, text),
        weight_bytes=size.total,
        full_attention_layers=sum(kind in (FULL, BOTH) for kind in holding),
        kv_heads=full_kv_heads(text),
        head_dim=full_head_dim(text),
        max_context_tokens=context_tokens(_named_context(config, text), text),
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        sliding_window_layers=sum(kind == SLIDING for kind in holding),
        chat_template=chat_template,
        dtype=model_dtype(config, text),
        named_context_tokens=_named_context(config, text),
        draft_layers=draft_layers,
        draft_weight_bytes=size.draft,
        vision_weight_bytes=size.vision,
        quantisation=Quantisation.of(config, text).label,
        weights_from="safetensors headers" if weights else "config.json and its quantisation (no tensors to look at)",
    )
    facts = _with_widths(facts, text)
    facts = _with_sliding(facts, text) if SLIDING in kinds else facts
    return _with_vision(_with_linear(facts, config, text, sum(kind in (LINEAR, BOTH) for kind in kinds)), config)


def _with_widths(facts: ModelFacts, text: Config) -> ModelFacts:
    """Widths of heads, latent vectors and feed-forward parts."""
    return replace(
        facts,
        attention_heads=int(text["num_attention_heads"]),
        v_head_dim=0 if text.get("kv_lora_rank") else int(text.get("v_head_dim") or 0),
        intermediate_size=_number(dense_width(text)),
        experts_per_token=_experts_per_token(text),
        expert_intermediate_size=expert_width(text) if expert_count(text) else 0,
        kv_lora_rank=int(text.get("kv_lora_rank") or 0),
        qk_rope_head_dim=int(text.get("qk_rope_head_dim") or 0),
        index_head_dim=int(text.get("index_head_dim") or 0),
        rotary_dim=_rotary_dim(text),
    )


def _with_sliding(facts: ModelFacts, text: Config) -> ModelFacts:
    """The window, and the heads of the layers that have one where they differ."""
    return replace(
        facts,
        sliding_window_tokens=sliding_window_tokens(text),
        sliding_kv_heads=int(text.get("swa_num_key_value_heads") or kv_head_count(text)),
        sliding_head_dim=int(text.get("swa_head_dim") or head_dim_of(text)),
    )


def _with_linear(facts: ModelFacts, config: Config, text: Config, layers: int) -> ModelFacts:
    """The state of so many linear-attention layers."""
    if not layers:
        return facts
    linear = _linear_state(config, text)
    return replace(facts, linear=linear, linear_attention_layers=layers, linear_state_bytes_per_slot=layers * state_bytes_per_layer(linear))


def _with_vision(facts: ModelFacts, config: Config) -> ModelFacts:
    """The widths of the vision tower, where there is one."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return facts
    return replace(
        facts,
        vision_hidden_size=int(vision.get("hidden_size") or 0),
        vision_intermediate_size=int(vision.get("intermediate_size") or 0),
    )


def text_config(config: Config) -> Config:
    """The language model's part of a configuration that has several; else all of it."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        part = config.get(key)
        if isinstance(part, Mapping):
            return text_config(part) if key == "thinker_config" else {"model_type": config.get("model_type"), **part}
    return config


def state_bytes_per_layer(linear: LinearStateFacts, state_dtype: str | None = None, extra_steps: int = 0) -> int:
    """Bytes that one linear layer keeps of one sequence, on all ranks together.

    conv_channels × (conv_kernel − 1 + extra_steps) × 2 + state_elements × bytes of the state's dtype. `extra_steps`: vLLM keeps one more
    step of the convolution for each draft token (mamba_utils.py, gated_delta_net_state_shape).
    """
    conv = linear.conv_channels * max(linear.conv_kernel - 1 + extra_steps, 0) * _CONV_STATE_BYTES
    return conv + round(linear.state_elements * dtype_bytes(state_dtype or linear.state_dtype))


def _check(text: Config) -> None:
    if text.get("num_hidden_layers") is None and isinstance(text.get("layers_block_type"), list):
        return
    for key, most in _NEEDED.items():
        value = text.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            found = "is missing" if value is None else f"is {str(value)[:40]!r}" if isinstance(value, str) else f"is {str(value)[:40]}"
            raise ModelError(
                f"config.json: {key} {found}", hint=f"it must be a whole number from 1 to {most:,} in a language model's config"
            )


def _check_facts(facts: ModelFacts) -> None:
    """No number of a model is below nothing, and none of those that we divide by is nothing."""
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        least = 1 if field.name in ("kv_heads", "head_dim", "max_context_tokens") else 0
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= _MOST:
            words = field.name.replace("_", " ")
            raise ModelError(
                f"config.json: it makes {words} {value:.6g}", hint=f"a model has {least} to {_MOST:.0e}: compare it with the original"
            )


def _estimated(config: Config, text: Config, kinds: Sequence[str], draft_layers: int) -> WeightBytes:
    try:
        return estimate(config, text, kinds, draft_layers)
    except (TypeError, ValueError, KeyError) as error:
        found = f"config.json: the weights cannot be worked out ({error})"
        raise ModelError(found, hint="compare it with the one of the model's publisher") from error


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


def _architecture(config: Config, text: Config) -> str:
    names = config.get("architectures") or text.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", ""))


def _without_shared(kinds: Sequence[str], text: Config) -> Sequence[str]:
    """Gemma 3n: the last layers read the cache of earlier ones and keep none."""
    shared = int(text.get("num_kv_shared_layers") or 0)
    return kinds[: len(kinds) - shared] if 0 < shared < len(kinds) else kinds


def _named_context(config: Config, text: Config) -> int:
    for source in (text, config):
        for key in ("max_position_embeddings", "model_max_length", "seq_length", "n_positions", "max_sequence_length"):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return 4096


def _experts_per_token(text: Config) -> int:
    """Routed experts of a token, the shared ones counted by their width."""
    if not expert_count(text):
        return 0
    routed = text.get("num_experts_per_tok") or text.get("num_experts_per_token") or text.get("moe_k") or text.get("top_k_experts") or 1
    width = expert_width(text)
    return int(max(routed) if isinstance(routed, list) else routed) + (-(-shared_width(text) // width) if width else 0)


def _rotary_dim(text: Config) -> int:
    """Rotated dimensions: those of the latent's rope part, or a share of the head."""
    if text.get("kv_lora_rank"):
        return int(text.get("qk_rope_head_dim") or 0)
    factor = text.get("partial_rotary_factor")
    parameters = text.get("rope_parameters")
    if factor is None and isinstance(parameters, Mapping):
        factor = parameters.get("partial_rotary_factor")
    return int(head_dim_of(text) * float(factor if isinstance(factor, int | float) else 1.0))


def _draft_layers(config: Config, text: Config) -> int:
    for source in (text, config):
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"):
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _linear_state(config: Config, text: Config) -> LinearStateFacts:
    """The shape of one linear layer's state, by family (as in weights._mixer_tensors)."""
    dtype = str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or "float32")
    if text.get("linear_num_value_heads"):
        keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
        heads, width = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
        kernel = int(text.get("linear_conv_kernel_dim") or 4)
        return LinearStateFacts(2 * keys + heads * width, kernel, heads * width * int(text["linear_key_head_dim"]), heads, width, dtype)
    kimi = text.get("linear_attn_config") or {}
    if text.get("linear_num_heads") or kimi:
        heads = int(text.get("linear_num_heads") or kimi.get("num_heads") or 32)
        width = int(text.get("linear_head_dim") or kimi.get("head_dim") or 128)
        kernel = int(text.get("linear_conv_kernel_dim") or kimi.get("short_conv_kernel_size") or 4)
        return LinearStateFacts(3 * heads * width, kernel, heads * width * width, heads, width, dtype)
    if text.get("conv_L_cache"):
        return LinearStateFacts(int(text["hidden_size"]), int(text["conv_L_cache"]), 0, 0, 0, dtype)
    heads, inner, groups, state = mamba2_shape(text)
    kernel = int(text.get("mamba_d_conv") or text.get("conv_kernel") or 4)
    return LinearStateFacts(inner + 2 * groups * state, kernel, inner * state, heads, inner // heads if heads else inner, dtype)
