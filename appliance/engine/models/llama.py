"""The Llama shape: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 (dense)."""

from __future__ import annotations

from appliance.core.context import context_tokens
from appliance.engine.models.config import DecoderConfig, LayerSpec, RawConfig


def read_llama(architecture: str, raw: RawConfig) -> DecoderConfig:
    """For the architectures that differ from Llama by a window, biases or a norm of queries and keys only.

    Biases need no flag: the decoder takes those that the checkpoint has.

    Raises:
        ModelError: a key is missing, wrong, or asks for what the decoder does not do.
    """
    raw.refuse("mlp_bias", False)
    raw.refuse("partial_rotary_factor", 1)
    raw.refuse("attn_logit_softcapping")
    raw.refuse("final_logit_softcapping")
    heads, kv_heads, head_dim = raw.attention_shape()
    rope = raw.rope()
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.whole("vocab_size"),
        hidden_size=raw.whole("hidden_size"),
        intermediate_size=raw.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(window, rope) for window in _windows(architecture, raw)),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        activation=raw.activation(),
        attention_scale=rope.magnitude**2 * head_dim**-0.5,
        tied_embedding=raw.flag("tie_word_embeddings", False),
        max_context_tokens=context_tokens(raw.whole("max_position_embeddings"), raw.fields),
        qk_norm=architecture.startswith("Qwen3"),
    )


def read_mistral3_text(_architecture: str, raw: RawConfig) -> DecoderConfig:
    """The language model of Mistral Small 3.1 and 3.2, which see as well; images are refused at the door. Raises as `read_llama`."""
    return read_llama("MistralForCausalLM", raw.text_part("mistral"))


def _windows(architecture: str, raw: RawConfig) -> list[int]:
    """Of each layer. Qwen names a window that it uses only where `use_sliding_window` says so, from a layer upwards."""
    count = raw.whole("num_hidden_layers")
    window = raw.fields.get("sliding_window") or 0
    if architecture.startswith("Qwen"):
        if not raw.flag("use_sliding_window", False):
            return [0] * count
        first = raw.fields.get("max_window_layers", count)
        return [window if index >= first else 0 for index in range(count)]
    return [window if architecture.startswith("Mistral") else 0] * count
