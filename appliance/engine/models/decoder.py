"""One decoder-only transformer for every family in the registry; knows nothing of paging or of requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from appliance.engine.models.config import DecoderConfig, RopeSpec
from appliance.engine.models.linear import linear
from appliance_kernels.rope.reference import rope_turn
from appliance_kernels.rows import RowKernels, RowReferences

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [rows, heads, D], k [rows, kv_heads, D], v the same) → [rows, heads·D]; also keeps k and v."""


class Weights(Protocol):
    """Tensors by their Hugging Face names: float32, but for matrices on a card (card.py)."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor; raises ModelError when it is missing or of another shape."""

    def stacked(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Matrices on top of each other, without a copy where they lie so in the file."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer. `qk_norm` is [heads + kv_heads, D]; the last two norms exist with sandwich norms only."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None


class Decoder:
    """Owns the weights.

    Attributes:
        config: what it is.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, rows: RowKernels | None = None) -> None:
        """Take the weights by name.

        Args:
            rows: of the device where the weights are; None: the CPU's.

        Raises:
            ModelError: a tensor is missing or has another shape than the configuration says.
        """
        self.config = config
        self._rows: RowKernels = rows or RowReferences()
        self._activation = {"silu": self._rows.silu_mul, "gelu_tanh": self._rows.gelu_tanh_mul}[config.activation]
        self._embedding = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._norm = norm_weight(weights, "model.norm.weight", config.hidden_size, config)
        shape = (config.vocab_size, config.hidden_size)
        self._head = self._embedding if config.tied_embedding else weights.get("lm_head.weight", shape)
        self._layers = [_read_layer(weights, f"model.layers.{index}.", config) for index in range(len(config.layers))]
        specs = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._rope_of_layer = [specs.index(layer.rope) for layer in config.layers]
        self._frequencies = [inverse_frequencies(spec, config.head_dim).to(self._embedding.device) for spec in specs]

    @property
    def dtype(self) -> torch.dtype:
        """Of matrices, and so of what goes from layer to layer."""
        return self._embedding.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers over some tokens, of any mixture of sequences.

        Args:
            token_ids, positions: [rows], int64; rows as `linear` wants them.
            attend: attention, which alone knows what sequence a row belongs to.

        Returns:
            [rows, hidden_size], before the last norm.
        """
        x = self._embedding.index_select(0, token_ids)
        if self.config.embedding_scale != 1.0:
            x = x.mul_(self.config.embedding_scale)
        turns = [rope_turn(frequencies, positions) for frequencies in self._frequencies]
        for index, layer in enumerate(self._layers):
            x = self._attention(index, layer, x, turns[self._rope_of_layer[index]], attend)
            x = self._feed_forward(layer, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Of some rows of `forward`'s result.

        Args:
            hidden: [rows, hidden_size]; rows as `linear` wants them.

        Returns:
            [rows, vocab_size].
        """
        return linear(self._rows.rms_norm(hidden, self._norm, self.config.norm_eps), self._head)

    def _attention(self, index: int, layer: _Layer, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        config = self.config
        turned = config.heads + config.kv_heads
        qkv = linear(self._rows.rms_norm(x, layer.input_norm, config.norm_eps), layer.qkv, layer.qkv_bias)
        heads = qkv.view(x.shape[0], turned + config.kv_heads, config.head_dim)
        qk, v = heads[:, :turned], heads[:, turned:]
        if layer.qk_norm is not None:
            qk = self._rows.rms_norm(qk, layer.qk_norm, config.norm_eps)
        qk = self._rows.rope(qk, *turn)
        mixed = attend(index, qk[:, : config.heads], qk[:, config.heads :], v)
        return self._add_back(x, linear(mixed, layer.out, layer.out_bias), layer.attention_post_norm)

    def _feed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = linear(self._rows.rms_norm(x, layer.mlp_norm, self.config.norm_eps), layer.gate_up)
        return self._add_back(x, linear(self._activation(gate_up), layer.down), layer.mlp_post_norm)

    def _add_back(self, x: Tensor, change: Tensor, post_norm: Tensor | None) -> Tensor:
        if post_norm is not None:
            change = self._rows.rms_norm(change, post_norm, self.config.norm_eps)
        return change.add_(x)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """f_i = base^(−2i/D), scaled: by 1/factor ("linear"), or so for long waves only, with a ramp between: over their turns in the
    original context ("llama3"), or over i, from where a wave makes beta_fast turns in it to where it makes beta_slow ("yarn").

    Returns:
        [D/2], float32.
    """
    frequencies = 1.0 / (spec.base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        turns = spec.original_context_tokens * frequencies / (2 * math.pi)  # over the original context
        ramp = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - ramp) * frequencies / spec.factor + ramp * frequencies
    if spec.kind == "yarn":
        ramp = _yarn_ramp(spec, head_dim)
        return (1 - ramp) * frequencies + ramp * frequencies / spec.factor
    return frequencies


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> Tensor:
    """From 0, waves that stay as they are, to 1: [D/2], float32."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(spec.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0.0, 1.0)


def _read_layer(weights: Weights, prefix: str, config: DecoderConfig) -> _Layer:
    attention, mlp, hidden = prefix + "self_attn.", prefix + "mlp.", config.hidden_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    mlp_norm = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"

    def norm(name: str) -> Tensor:
        return norm_weight(weights, f"{prefix}{name}.weight", hidden, config)

    def as_added(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(qkv.dtype)

    qkv = weights.stacked(tuple(f"{attention}{name}_proj.weight" for name in ("q", "k", "v")), (q_rows, kv_rows, kv_rows), hidden)
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=qkv,
        qkv_bias=as_added(qkv_bias(weights, attention, (q_rows, kv_rows, kv_rows))),
        qk_norm=qk_norm_weight(weights, attention, config) if config.qk_norm else None,
        out=weights.get(attention + "o_proj.weight", (hidden, q_rows)),
        out_bias=as_added(optional(weights, attention + "o_proj.bias", (hidden,))),
        mlp_norm=norm(mlp_norm),
        gate_up=weights.stacked((mlp + "gate_proj.weight", mlp + "up_proj.weight"), (config.intermediate_size,) * 2, hidden),
        down=weights.get(mlp + "down_proj.weight", (hidden, config.intermediate_size)),
        attention_post_norm=norm("post_attention_layernorm") if config.sandwich_norms else None,
        mlp_post_norm=norm("post_feedforward_layernorm") if config.sandwich_norms else None,
    )


def norm_weight(weights: Weights, name: str, size: int, config: DecoderConfig) -> Tensor:
    """As it is multiplied with."""
    weight = weights.get(name, (size,))
    return weight + config.norm_offset if config.norm_offset else weight


def optional(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """None where the checkpoint has none."""
    return weights.get(name, shape) if weights.has(name) else None


def qkv_bias(weights: Weights, attention: str, rows: tuple[int, int, int]) -> Tensor | None:
    """Of queries, keys and values, side by side; None where the checkpoint has none."""
    names = [f"{attention}{name}_proj.bias" for name in ("q", "k", "v")]
    if not weights.has(names[0]):
        return None
    return torch.cat([weights.get(name, (size,)) for name, size in zip(names, rows, strict=True)])


def qk_norm_weight(weights: Weights, attention: str, config: DecoderConfig) -> Tensor:
    """One weight row a head, so that queries and keys are normalised in one operation."""
    q = norm_weight(weights, attention + "q_norm.weight", config.head_dim, config)
    k = norm_weight(weights, attention + "k_norm.weight", config.head_dim, config)
    return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
