"""What the decoder must know of a model, and how to read it from a config.json of either vintage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.core.errors import ModelError

OTHER_ENGINES = 'serve this model with another engine: engine.backend = "sglang" or "vllm"'
SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions turn heads.

    Attributes:
        base: θ of the frequencies base^(−2i/D).
        kind: one of SCALINGS.
        factor: of the scaling; 1.0 for "default".
        low_freq_factor, high_freq_factor: of "llama3".
        original_context_tokens: of "llama3" and "yarn".
        beta_fast, beta_slow, whole_dimensions: of "yarn".
        magnitude: of "yarn": turned queries and keys are each multiplied by it.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_dimensions: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer.

    Attributes:
        window_tokens: how far back it sees, its own token included; 0: everything.
    """

    window_tokens: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        architecture: as in config.json.
        heads, kv_heads, head_dim: of attention; heads is a multiple of kv_heads.
        layers: one entry a layer.
        activation: "silu" or "gelu_tanh", of the feed-forward gate.
        qk_norm: queries and keys are normalised a head before they are turned.
        sandwich_norms: attention and feed-forward are also normalised before they are added back.
        norm_offset: added to every norm weight (Gemma stores w − 1).
        embedding_scale: the embedding is multiplied by it.
        attention_scale: q·k is multiplied by it.
        tied_embedding: the output projection is the embedding.
        max_context_tokens: the model's own limit.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: str
    attention_scale: float
    tied_embedding: bool
    max_context_tokens: int
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


class RawConfig:
    """config.json with refusals that name the key."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def text_part(self, kind: str, usual: Mapping[str, Any] | None = None) -> RawConfig:
        """The language model's of a model that sees as well; what its file leaves out is as `usual`.

        Raises:
            ModelError: there is none, or of another kind.
        """
        part = self.fields.get("text_config")
        if not isinstance(part, dict) or part.get("model_type", kind) != kind:
            found = part.get("model_type") if isinstance(part, dict) else part
            raise ModelError(f"config.json: text_config is of kind {found!r:.60}; supported here: {kind!r}", hint=OTHER_ENGINES)
        whole = {name: self.fields[name] for name in ("tie_word_embeddings",) if name in self.fields}  # one head, whoever sees
        return RawConfig({**(usual or {}), **part, **whole})

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
            ModelError: missing without a default, or of another kind.
        """
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} is {value!r}, expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises ModelError as `whole`."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json: {name} is {value!r}, expected a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ModelError as `whole`."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value!r}, expected true or false")
        return value

    def refuse(self, name: str, *allowed: object) -> None:
        """Raise ModelError unless the key is absent, null or one of these values: the decoder does not do the rest."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise ModelError(
                f"config.json: {name} = {value!r} is not supported by the built-in engine",
                hint=f"supported: {', '.join(repr(a) for a in allowed) or 'absent'}; {OTHER_ENGINES}",
            )

    def attention_shape(self) -> tuple[int, int, int]:
        """heads, kv_heads and head_dim.

        Raises:
            ModelError: heads is no multiple of kv_heads, or a head's size is odd.
        """
        heads = self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        head_dim = self.whole("head_dim", max(1, self.whole("hidden_size") // heads))
        if heads % kv_heads:
            raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding turns pairs")
        return heads, kv_heads, head_dim

    def activation(self) -> str:
        """ "silu" or "gelu_tanh". Raises ModelError for another."""
        name = self.fields.get("hidden_activation") or self.fields.get("hidden_act") or "silu"
        known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
        if name not in known:
            raise ModelError(f"config.json: activation {name!r} is not supported; supported: {', '.join(known)}")
        return known[name]

    def rope(
        self,
        layer_type: str | None = None,
        base_key: str = "rope_theta",
        base: float = 10_000.0,
        kinds: Sequence[str] = SCALINGS,
    ) -> RopeSpec:
        """From `rope_parameters` (transformers 5; a layer type's own where they differ) or `rope_theta` and `rope_scaling`.

        Raises:
            ModelError: a scaling that the decoder does not do.
        """
        new = self.fields.get("rope_parameters") or {}
        if layer_type is not None and isinstance(new.get(layer_type), dict):
            new = new[layer_type]
        scaling = new or (self.fields.get("rope_scaling") or {} if base_key == "rope_theta" else {})
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in kinds:
            raise ModelError(
                f"config.json: rope scaling {kind!r} is not supported by the built-in engine",
                hint=f"supported: {', '.join(kinds)}; {OTHER_ENGINES}",
            )
        spec = RopeSpec(
            base=RawConfig(new).number("rope_theta", self.number(base_key, base)),
            kind=kind,
            factor=RawConfig(scaling).number("factor", 1.0),
            low_freq_factor=RawConfig(scaling).number("low_freq_factor", 1.0),
            high_freq_factor=RawConfig(scaling).number("high_freq_factor", 4.0),
            original_context_tokens=RawConfig(scaling).whole("original_max_position_embeddings", 8192),
        )
        return self._yarn(spec, RawConfig(scaling)) if kind == "yarn" else spec

    def _yarn(self, spec: RopeSpec, scaling: RawConfig) -> RopeSpec:
        """With what YaRN has beside; defaults as the paper and transformers have them."""
        original = scaling.whole("original_max_position_embeddings", self.whole("max_position_embeddings"))
        factor = scaling.number("factor")
        if factor < 1.0:
            raise ModelError(f"config.json: rope scaling factor is {factor:g}, expected at least 1")
        one, all_dims = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
        usual = _magnitude(factor, one) / _magnitude(factor, all_dims) if one and all_dims else _magnitude(factor, 1.0)
        return replace(
            spec,
            original_context_tokens=original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            whole_dimensions=scaling.flag("truncate", True),
            magnitude=scaling.number("attention_factor", usual),
        )


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0
