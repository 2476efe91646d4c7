"""GGUF architecture → config.json and tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from appliance.core.errors import ModelError
from appliance.engine.gguf_file import GgufFile, GgufTensor, field

Array = NDArray[numpy.float32]

_SLIDING_PATTERN = 6
"""Gemma 3: every sixth layer sees everything. GGUF does not say."""
_GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose attention is scaled by hidden size over heads, not by head size. GGUF does not say that either."""


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One tensor of the result.

    Attributes:
        name: Hugging Face's.
        unit_rows: `transform` may be given any multiple of so many rows.
    """

    name: str
    source: GgufTensor
    unit_rows: int = 1
    transform: Callable[[Array], Array] | None = None

    @property
    def size_bytes(self) -> int:
        """In float32."""
        return 4 * int(numpy.prod(self.source.shape))


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What to write. Tensors that the engine reads together lie together: q, k, v and gate, up."""

    config: dict[str, Any]
    jobs: tuple[TensorJob, ...]


def plan_model(file: GgufFile) -> ModelPlan:
    """Read the architecture.

    Raises:
        ModelError: an architecture or a rope scaling that we do not convert, or metadata or a tensor is missing.
    """
    architecture = field(file.fields, "general.architecture", str)
    if architecture == "llama":
        return _plan_llama(file)
    if architecture == "gemma3":
        return _plan_gemma3(file)
    raise ModelError(
        f"{file.path} is of architecture {architecture!r}, which is not converted",
        hint="converted: llama, gemma3; take the safetensors version of the model, or another engine",
    )


def _plan_llama(file: GgufFile) -> ModelPlan:
    if "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path} scales its rope by a table (Llama 3.1 and later)", hint="take the safetensors version of the model")
    config = _shared_config(file, "llama") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": field(file.fields, "llama.rope.freq_base", float, 10_000.0),
    }
    _refuse_rope_scaling(file, "llama")
    head_dim = config["head_dim"]

    def interleave_back(rows: Array) -> Array:
        """llama.cpp turns neighbours (0, 1), Hugging Face halves (0, D/2): undo its reordering of a head's rows."""
        return rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)

    jobs = _shared_jobs(file, config, {"q": interleave_back, "k": interleave_back}, None)
    return ModelPlan(config, tuple(jobs))


def _plan_gemma3(file: GgufFile) -> ModelPlan:
    config = _shared_config(file, "gemma3")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scalar = config["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else config["head_dim"]
    config |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": field(file.fields, "gemma3.attention.sliding_window", int),
        "layer_types": ["full_attention" if (i + 1) % _SLIDING_PATTERN == 0 else "sliding_attention" for i in range(layers)],
        "rope_theta": field(file.fields, "gemma3.rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": field(file.fields, "gemma3.rope.freq_base_swa", float, 10_000.0),
    }
    if file.fields.get("gemma3.rope.scaling.type", "none") == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": field(file.fields, "gemma3.rope.scaling.factor", float)}
    else:
        _refuse_rope_scaling(file, "gemma3")

    def norm_back(weights: Array) -> Array:
        """GGUF has w, Hugging Face w − 1 (and adds the 1 again)."""
        return weights - numpy.float32(1.0)

    jobs = _shared_jobs(file, config, {}, norm_back)
    return ModelPlan(config, tuple(jobs))


def _shared_config(file: GgufFile, prefix: str) -> dict[str, Any]:
    def whole(key: str, default: int | None = None) -> int:
        return int(field(file.fields, f"{prefix}.{key}", int, default))

    tokens = field(file.fields, "tokenizer.ggml.tokens", list)
    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    return {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": whole("attention.key_length", hidden // heads),
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": round(field(file.fields, f"{prefix}.attention.layer_norm_rms_epsilon", float), 12),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _refuse_rope_scaling(file: GgufFile, prefix: str) -> None:
    kind = file.fields.get(f"{prefix}.rope.scaling.type", "none")
    if kind != "none":
        raise ModelError(f"{file.path} has rope scaling {kind!r}, which is not converted", hint="take the safetensors version of the model")


_LAYER = (
    # (GGUF name, Hugging Face name, what it is)
    ("attn_norm", "input_layernorm", "norm"),
    ("attn_q", "self_attn.q_proj", "q"),
    ("attn_k", "self_attn.k_proj", "k"),
    ("attn_v", "self_attn.v_proj", "v"),
    ("attn_q_norm", "self_attn.q_norm", "norm"),
    ("attn_k_norm", "self_attn.k_norm", "norm"),
    ("attn_output", "self_attn.o_proj", "o"),
    ("post_attention_norm", "post_attention_layernorm", "norm"),
    ("ffn_norm", "{mlp_norm}", "norm"),
    ("ffn_gate", "mlp.gate_proj", "gate"),
    ("ffn_up", "mlp.up_proj", "up"),
    ("ffn_down", "mlp.down_proj", "down"),
    ("post_ffw_norm", "post_feedforward_layernorm", "norm"),
)
_OPTIONAL = frozenset({"attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"})


def _shared_jobs(
    file: GgufFile, config: dict[str, Any], transforms: dict[str, Callable[[Array], Array]], norm: Callable[[Array], Array] | None
) -> list[TensorJob]:
    def job(source: str, name: str, kind: str) -> TensorJob:
        if source not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {source}", hint="it is incomplete: download it again")
        transform = norm if kind == "norm" else transforms.get(kind)
        return TensorJob(name, file.tensors[source], config["head_dim"] if kind in transforms else 1, transform)

    mlp_norm = "pre_feedforward_layernorm" if "blk.0.post_ffw_norm.weight" in file.tensors else "post_attention_layernorm"
    jobs = [job("token_embd.weight", "model.embed_tokens.weight", "embedding")]
    for index in range(config["num_hidden_layers"]):
        for source, name, kind in _LAYER:
            full = f"blk.{index}.{source}.weight"
            if full in file.tensors or source not in _OPTIONAL:
                jobs.append(job(full, f"model.layers.{index}.{name.format(mlp_norm=mlp_norm)}.weight", kind))
    jobs.append(job("output_norm.weight", "model.norm.weight", "norm"))
    if not config["tie_word_embeddings"]:
        jobs.append(job("output.weight", "lm_head.weight", "head"))
    used = {j.source.name for j in jobs}
    left = sorted(set(file.tensors) - used)
    if left:
        raise ModelError(f"{file.path} has {len(left)} tensors that we do not know, such as {left[0]}", hint="take the safetensors version")
    return jobs
