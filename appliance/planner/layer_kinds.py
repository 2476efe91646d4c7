"""Which layers keep what: read out of config.json's many spellings of the same thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FULL = "full"
SLIDING = "sliding"
LINEAR = "linear"
BOTH = "both"
"""Attention and a linear mixer side by side (Falcon-H1)."""
NONE = "none"
"""Feed-forward only: keeps nothing."""

Config = Mapping[str, Any]

_WORDS = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL, "deepseek_sparse_attention": FULL,
    "sliding_attention": SLIDING, "chunked_attention": SLIDING, "local_attention": SLIDING, "sliding_window": SLIDING,
    "linear_attention": LINEAR, "mamba": LINEAR, "mamba2": LINEAR, "recurrent": LINEAR, "conv": LINEAR, "kda": LINEAR,
    "mlp": NONE, "moe": NONE, "none": NONE,
}  # fmt: skip
_PATTERN_CHARACTERS = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}
"""Nemotron-H writes its layers as one string."""


def layer_kinds(text: Config, layers: int) -> tuple[str, ...]:
    """The kind of each of the `layers` layers, in order.

    Args:
        text: config.json of the language model (`text_config` where there is one).
    """
    for read in (_listed, _by_pattern, _by_interval, _by_window):
        kinds = read(text, layers)
        if kinds:
            return tuple(kinds[:layers]) if len(kinds) >= layers else tuple(kinds) + (FULL,) * (layers - len(kinds))
    return (FULL,) * layers


def _listed(text: Config, layers: int) -> Sequence[str]:
    """One word a layer."""
    words = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(words, list) and words:
        return [_WORDS.get(str(word), FULL) for word in words]
    kimi = text.get("linear_attn_config")
    if isinstance(kimi, Mapping) and kimi.get("kda_layers"):
        linear = {int(i) - 1 for i in kimi["kda_layers"]}  # Kimi counts its layers from 1
        return [LINEAR if i in linear else FULL for i in range(layers)]
    numbers = text.get("attn_type_list")  # MiniMax: 0 linear, 1 softmax
    if isinstance(numbers, list) and numbers:
        return [FULL if number else LINEAR for number in numbers]
    indices = text.get("attn_layer_indices")  # Bamba
    if isinstance(indices, list) and indices:
        return [FULL if i in set(indices) else LINEAR for i in range(layers)]
    return ()


def _by_pattern(text: Config, layers: int) -> Sequence[str]:
    """A string or a number that repeats."""
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_PATTERN_CHARACTERS.get(character, FULL) for character in pattern]
    switches = text.get("hybrid_layer_pattern")  # MiMo: 1 sliding, 0 full
    if isinstance(switches, list) and switches:
        return [SLIDING if switch else FULL for switch in switches]
    if text.get("model_type") == "falcon_h1":
        return [BOTH] * layers
    period = text.get("attn_layer_period")  # Jamba
    if period:
        offset = int(text.get("attn_layer_offset") or 0)
        return [FULL if i % int(period) == offset else LINEAR for i in range(layers)]
    return ()


def _by_interval(text: Config, layers: int) -> Sequence[str]:
    """Every n-th layer is full attention, the others are linear."""
    if not (text.get("linear_num_value_heads") or text.get("linear_value_head_dim")):
        return ()
    interval = int(text.get("full_attention_interval") or 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]


def _by_window(text: Config, layers: int) -> Sequence[str]:
    """Older configurations of sliding-window models name the window and leave the pattern to the code."""
    if text.get("use_sliding_window") is False or not sliding_window_tokens(text):
        return ()
    model_type = str(text.get("model_type", ""))
    every = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or _EVERY.get(model_type)
    if isinstance(every, int) and every > 1:
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    first = text.get("max_window_layers")  # Qwen2: the layers from here on slide
    if isinstance(first, int) and text.get("use_sliding_window"):
        return [SLIDING if i >= first else FULL for i in range(layers)]
    if model_type in ("mistral", "phi3", "mixtral", "starcoder2"):
        return [SLIDING] * layers
    return ()


_EVERY = {
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2,
    "olmo3": 4, "exaone4": 4, "llama4_text": 4,
}  # fmt: skip
"""The n-th layer that sees everything, where config.json does not say."""


def sliding_window_tokens(text: Config) -> int:
    """Tokens that a sliding (or chunked, Llama 4) layer sees; 0 without."""
    return int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
