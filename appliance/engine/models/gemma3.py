"""Gemma 3, text only: sliding and full layers with a rope each, norms on both sides, norms of queries and keys."""

from __future__ import annotations

from appliance.core.errors import ModelError
from appliance.engine.models.config import DecoderConfig, LayerSpec, RawConfig

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_USUAL = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""What the files of the larger models leave out, because transformers takes it for granted."""
_SCALINGS = ("default", "linear", "llama3")
"""Not YaRN, whose magnitude would be another one in each kind of layer."""


def read_gemma3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Raises ModelError: a key is missing, wrong, or asks for what the decoder does not do."""
    raw.refuse("attn_logit_softcapping")
    raw.refuse("final_logit_softcapping")
    raw.refuse("use_bidirectional_attention", False)
    heads, kv_heads, head_dim = raw.attention_shape()
    hidden_size = raw.whole("hidden_size")
    specs = {
        _SLIDING: LayerSpec(raw.whole("sliding_window"), raw.rope(_SLIDING, "rope_local_base_freq", 10_000.0, _SCALINGS)),
        _FULL: LayerSpec(0, raw.rope(_FULL, "rope_theta", 1_000_000.0, _SCALINGS)),
    }
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(specs[kind] for kind in _layer_types(raw)),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        activation=raw.activation(),
        attention_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        tied_embedding=raw.flag("tie_word_embeddings", True),
        max_context_tokens=raw.whole("max_position_embeddings"),
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
    )


def read_gemma3_text(architecture: str, raw: RawConfig) -> DecoderConfig:
    """The language model of those that see as well (4B and larger); images are refused at the door. Raises as `read_gemma3`."""
    return read_gemma3(architecture, raw.text_part("gemma3_text", _USUAL))


def _layer_types(raw: RawConfig) -> list[str]:
    count = raw.whole("num_hidden_layers")
    types = raw.fields.get("layer_types")
    if types is None:  # older files: every sixth layer sees everything
        pattern = raw.whole("sliding_window_pattern", 6)
        return [_FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(count)]
    if not isinstance(types, list) or len(types) != count or set(types) - {_SLIDING, _FULL}:
        raise ModelError(f"config.json: layer_types must hold {count} entries, each {_SLIDING} or {_FULL}")
    return types
