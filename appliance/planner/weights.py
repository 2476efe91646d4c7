"""How many bytes the weights take, worked out from config.json when there are no tensors to look at.

weight bytes = Σ over groups of tensors: numbers × bits ÷ 8, where the bits are those of the quantisation for the tensors that it covers and
those of `dtype` for the others. Counted against transformers' own models on the meta device (tests/unit/planner/test_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.planner.elements import SAFETENSORS_BITS, bits_of
from appliance.planner.layer_kinds import BOTH, FULL, LINEAR, SLIDING
from appliance.planner.quantisation import Quantisation

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tensors:
    """A group of tensors that are quantised alike.

    Attributes:
        module: the name of one of them, as the quantisation's list of exceptions spells it.
        elements: how many numbers, over all layers.
        linear: whether it is the weight of a linear layer, which is what a quantisation covers.
    """

    module: str
    elements: int
    linear: bool = True


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes by what may be left unloaded."""

    text: int
    draft: int
    vision: int

    @property
    def total(self) -> int:
        """All of the checkpoint."""
        return self.text + self.draft + self.vision


def estimate(config: Config, text: Config, kinds: Sequence[str], draft_layers: int) -> WeightBytes:
    """Bytes of the checkpoint that this config.json describes.

    Args:
        config: all of config.json; `text` its language model's part.
        kinds: of the layers, from layer_kinds.
    """
    plain_bits = bits_of(model_dtype(config, text))
    quantisation = Quantisation.of(config, text)

    def size_bytes(groups: Iterator[Tensors]) -> int:
        return round(sum(group.elements * quantisation.bits(group.module, group.linear, plain_bits) for group in groups) / 8)

    vision = config.get("vision_config")
    return WeightBytes(
        text=size_bytes(_text_tensors(config, text, kinds)),
        draft=size_bytes(_draft_tensors(text, draft_layers)),
        vision=size_bytes(_vision_tensors(vision, int(text["hidden_size"]))) if isinstance(vision, Mapping) else 0,
    )


def model_dtype(config: Config, text: Config) -> str:
    """The dtype of what is not quantised; bfloat16 where config.json does not say."""
    for source in (config, text):
        for key in ("dtype", "torch_dtype"):
            word = source.get(key)
            if isinstance(word, str) and word not in ("auto", ""):
                return word.removeprefix("torch.")
    return "bfloat16"


def tied(config: Config, text: Config) -> bool:
    """Whether the output projection is the embedding."""
    for source in (config, text):
        if source.get("tie_word_embeddings") is not None:
            return bool(source["tie_word_embeddings"])
    return str(text.get("model_type", "")).startswith(("gemma", "cohere"))


def _text_tensors(config: Config, text: Config, kinds: Sequence[str]) -> Iterator[Tensors]:
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    yield Tensors("model.embed_tokens", vocab * hidden, linear=False)
    if not tied(config, text):
        yield Tensors("lm_head", vocab * hidden)
    sliding = sum(kind == SLIDING for kind in kinds)
    wide = sum(kind in (FULL, BOTH) for kind in kinds)
    mixers = sum(kind in (LINEAR, BOTH) for kind in kinds)
    yield from _times(sliding, attention_tensors(text, head_dim_of(text), kv_head_count(text)))
    yield from _times(wide, attention_tensors(text, full_head_dim(text), full_kv_heads(text), shared=bool(text.get("attention_k_eq_v"))))
    yield from _times(mixers, _mixer_tensors(text))
    dense = min(dense_layer_count(text, len(kinds)), len(kinds)) if expert_count(text) else len(kinds)
    yield from _feed_forward_tensors(text, len(kinds), dense)
    yield Tensors("model.layers.0.input_layernorm", hidden * (2 * len(kinds) + 1), linear=False)
    yield from _per_layer_embeddings(text, len(kinds))


def _times(count: int, groups: Iterator[Tensors]) -> Iterator[Tensors]:
    return (Tensors(group.module, group.elements * count, group.linear) for group in groups)


def attention_tensors(text: Config, head_dim: int, kv_heads: int, *, shared: bool = False) -> Iterator[Tensors]:
    """One layer's attention projections: grouped heads, or latent (MLA) where there is a kv_lora_rank.

    `shared`: values are the keys (Gemma 4's attention_k_eq_v), so there is no v_proj.
    """
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    name = "model.layers.0.self_attn."
    if text.get("kv_lora_rank"):
        yield from _latent_attention(text, hidden, heads, name)
        return
    gate = 2 if output_gated(text) else 1
    yield Tensors(name + "q_proj", hidden * heads * head_dim * gate)
    yield Tensors(name + "k_proj", hidden * kv_heads * head_dim)
    if not shared:
        yield Tensors(name + "v_proj", hidden * kv_heads * int(text.get("v_head_dim") or head_dim))
    yield Tensors(name + "o_proj", heads * head_dim * hidden)


def _latent_attention(text: Config, hidden: int, heads: int, name: str) -> Iterator[Tensors]:
    rank, rope = int(text["kv_lora_rank"]), int(text.get("qk_rope_head_dim") or 0)
    nope, value = int(text.get("qk_nope_head_dim") or 128), int(text.get("v_head_dim") or 128)
    q_rank = text.get("q_lora_rank")
    if q_rank:
        yield Tensors(name + "q_a_proj", hidden * int(q_rank))
        yield Tensors(name + "q_b_proj", int(q_rank) * heads * (nope + rope))
    else:
        yield Tensors(name + "q_proj", hidden * heads * (nope + rope))
    yield Tensors(name + "kv_a_proj_with_mqa", hidden * (rank + rope))
    yield Tensors(name + "kv_b_proj", rank * heads * (nope + value))
    yield Tensors(name + "o_proj", heads * value * hidden)


def head_dim_of(text: Config) -> int:
    """Width of a head: named, or the residual stream shared out."""
    return int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))


def kv_head_count(text: Config) -> int:
    """Key heads of a layer, of the sliding ones where they differ."""
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def full_kv_heads(text: Config) -> int:
    """Key heads of a layer that sees everything."""
    return int(text.get("num_global_key_value_heads") or kv_head_count(text))


def full_head_dim(text: Config) -> int:
    """Gemma 4: the layers that see everything have wider heads."""
    for settings in (text.get("per_layer_config") or {}).values():
        if isinstance(settings, Mapping) and settings.get("head_dim"):
            return int(settings["head_dim"])
    return int(text.get("global_head_dim") or head_dim_of(text))


def output_gated(text: Config) -> bool:
    """Whether q_proj also makes a gate for the attention's output (Qwen3-Next and what followed)."""
    if text.get("attn_output_gate") is not None:
        return bool(text["attn_output_gate"])
    return str(text.get("model_type", "")).startswith(("qwen3_next", "qwen3_5", "qwen4"))


def _mixer_tensors(text: Config) -> Iterator[Tensors]:
    """One linear layer: gated delta net, Kimi delta, or Mamba 2."""
    hidden, name = int(text["hidden_size"]), "model.layers.0.linear_attn."
    if text.get("linear_num_value_heads"):
        keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
        values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
        yield Tensors(name + "in_proj_qkv", hidden * (2 * keys + values))
        yield Tensors(name + "in_proj_z", hidden * values)
        yield Tensors(name + "in_proj_a", hidden * 2 * int(text["linear_num_value_heads"]))
        yield Tensors(name + "out_proj", values * hidden)
        yield Tensors(name + "conv1d", (2 * keys + values) * int(text.get("linear_conv_kernel_dim") or 4), linear=False)
    elif text.get("linear_num_heads") or text.get("linear_attn_config"):
        kimi = text.get("linear_attn_config") or {}
        heads = int(text.get("linear_num_heads") or kimi.get("num_heads") or 32)
        width = heads * int(text.get("linear_head_dim") or kimi.get("head_dim") or 128)
        rank = width // heads
        yield Tensors(name + "q_proj", 4 * hidden * width)  # q, k, v and out
        yield Tensors(name + "f_a_proj", 2 * (hidden * rank + rank * width))  # the decay's and the gate's low-rank pairs
        yield Tensors(name + "b_proj", hidden * heads)
    elif text.get("conv_L_cache"):  # LFM2: a gated short convolution
        yield Tensors(name + "in_proj", 4 * hidden * hidden)
    else:
        yield from _mamba2_tensors(text, hidden)


def _mamba2_tensors(text: Config, hidden: int) -> Iterator[Tensors]:
    heads, inner, groups, state = mamba2_shape(text)
    yield Tensors("model.layers.0.mamba.in_proj", hidden * (2 * inner + 2 * groups * state + heads))
    yield Tensors("model.layers.0.mamba.out_proj", inner * hidden)


def mamba2_shape(text: Config) -> tuple[int, int, int, int]:
    """(heads, inner width, groups, state width) of a Mamba 2 layer, in the spellings of Bamba, Granite, Falcon-H1 and Nemotron-H."""
    heads = int(text.get("mamba_n_heads") or text.get("mamba_num_heads") or text.get("n_mamba_heads") or 0)
    width = text.get("mamba_d_head") or text.get("mamba_head_dim") or 0
    inner = int(text.get("mamba_d_ssm") or 0) or heads * int(width if isinstance(width, int) else 0)
    if not inner:
        inner = int(text["hidden_size"]) * int(text.get("mamba_expand") or 2)
    groups = int(text.get("mamba_n_groups") or text.get("n_groups") or 1)
    return heads, inner, groups, int(text.get("mamba_d_state") or text.get("ssm_state_size") or 128)


def _feed_forward_tensors(text: Config, layers: int, dense: int) -> Iterator[Tensors]:
    """Of so many layers, `dense` of which have no experts."""
    hidden = int(text["hidden_size"])
    experts = expert_count(text)
    matrices = 2 if text.get("model_type") == "nemotron_h" else 3  # up and down; or gate, up and down
    if dense:
        yield Tensors("model.layers.0.mlp.gate_proj", dense * matrices * hidden * dense_width(text))
    if experts:
        sparse = layers - dense
        width = expert_width(text)
        yield Tensors("model.layers.0.mlp.experts.0.gate_proj", sparse * experts * matrices * hidden * width)
        yield Tensors("model.layers.0.mlp.gate", sparse * experts * hidden, linear=False)
        yield Tensors("model.layers.0.mlp.shared_expert.gate_proj", sparse * matrices * hidden * shared_width(text))


def dense_width(text: Config) -> int:
    """Width of a dense feed-forward layer; the widest where they differ (Gemma 3n)."""
    width = text.get("intermediate_size_mlp") or text.get("intermediate_size") or 4 * int(text["hidden_size"])
    return max(int(w) for w in width) if isinstance(width, list) else int(width)


def expert_count(text: Config) -> int:
    """Experts of one layer; 0 for a dense model."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        value = text.get(key)
        if isinstance(value, list):
            value = max(value, default=0)
        if value:
            return int(value)
    return 0


def expert_width(text: Config) -> int:
    """Width of one expert."""
    return int(text.get("moe_intermediate_size") or text.get("expert_intermediate_size") or text.get("intermediate_size") or 0)


def shared_width(text: Config) -> int:
    """Width of all shared experts of a layer together; 0 without."""
    named = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size")
    if named:
        return int(named)
    count = text.get("n_shared_experts") or text.get("num_shared_experts") or text.get("moe_num_shared_experts") or 0
    return int(count) * expert_width(text)


def dense_layer_count(text: Config, layers: int) -> int:
    """How many layers of a mixture of experts are dense all the same."""
    words = text.get("mlp_layer_types")
    if isinstance(words, list) and words:
        return sum(word == "dense" for word in words[:layers])
    first = text.get("first_k_dense_replace")
    if first:
        return int(first)
    moe_layers = text.get("moe_layers")
    if isinstance(moe_layers, list) and moe_layers:
        return layers - len(moe_layers)
    return len(text.get("mlp_only_layers") or ())


def _per_layer_embeddings(text: Config, layers: int) -> Iterator[Tensors]:
    """Gemma 3n and 4: an embedding a layer."""
    width = int(text.get("hidden_size_per_layer_input") or 0)
    if width:
        vocab, hidden = int(text.get("vocab_size_per_layer_input") or text["vocab_size"]), int(text["hidden_size"])
        yield Tensors("model.embed_tokens_per_layer", vocab * layers * width, linear=False)
        yield Tensors("model.layers.0.per_layer_input_gate", hidden * width * layers * 3)


def _draft_tensors(text: Config, draft_layers: int) -> Iterator[Tensors]:
    """A multi-token-prediction layer: a projection of two hidden states into one, then a layer as the others."""
    if draft_layers:
        hidden = int(text["hidden_size"])
        dense = 0 if expert_count(text) else 1  # it stands behind the last layer, where the dense ones are long past (DeepSeek)
        yield Tensors("mtp.fc", draft_layers * 2 * hidden * hidden)
        # DeepSeek's is quantised as the layers before it are; Qwen's is left alone.
        prefix = "model." if text.get("num_nextn_predict_layers") else "mtp."
        for group in (*attention_tensors(text, full_head_dim(text), full_kv_heads(text)), *_feed_forward_tensors(text, 1, dense)):
            yield Tensors(group.module.replace("model.", prefix, 1), group.elements * draft_layers, group.linear)


def _vision_tensors(vision: Config, text_hidden: int) -> Iterator[Tensors]:
    """A vision transformer: blocks, patch and position embeddings, and the projection into the text's width."""
    hidden = int(vision.get("hidden_size") or vision.get("embed_dim") or 0)
    if not hidden:
        return
    depth = int(vision.get("depth") or vision.get("num_hidden_layers") or vision.get("num_layers") or 24)
    width = int(vision.get("intermediate_size") or 4 * hidden)
    yield Tensors("visual.blocks.0.attn.qkv", depth * (4 * hidden * hidden + 2 * hidden * width))
    patch = int(vision.get("patch_size") or 14)
    frames = int(vision.get("temporal_patch_size") or 1)
    positions = int(vision.get("num_position_embeddings") or (int(vision.get("image_size") or 336) // patch) ** 2)
    yield Tensors("visual.patch_embed", hidden * (3 * frames * patch * patch + positions), linear=False)
    merged = hidden * int(vision.get("spatial_merge_size") or 1) ** 2
    yield Tensors("visual.merger", merged * merged + merged * int(vision.get("out_hidden_size") or text_hidden))


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of one tensor of a safetensors header.

    Raises:
        KeyError: a dtype that safetensors does not have.
    """
    elements = 1
    for size in shape:
        elements *= size
    return (elements * SAFETENSORS_BITS[dtype] + 7) // 8
