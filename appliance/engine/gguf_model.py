"""GGUF architecture → config.json and tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from appliance.core.errors import ModelError
from appliance.engine.gguf_file import GgufFile, GgufTensor, check_readable, field
from appliance.engine.models.registry import read_config

Array = NDArray[numpy.float32]

_SLIDING_PATTERN = 6
"""Gemma 3: every sixth layer sees everything. GGUF does not say."""
_ROPE_TABLE = "rope_freqs.weight"
_FIRST_BIAS = "blk.0.attn_q.bias"
_LLAMA3_CONTEXT_TOKENS = 8192
"""Of Llama 3 before its context was stretched."""
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
    if architecture not in _PLANS:
        raise ModelError(
            f"{file.path} is of architecture {architecture!r}, which is not converted",
            hint=f'converted: {", ".join(_PLANS)}; take the safetensors version of the model, or engine.backend = "llamacpp"',
        )
    plan = _PLANS[architecture](file)
    read_config(plan.config)  # what the engine would refuse is not worth writing
    for job in plan.jobs:
        if job.source.data.shape[0] % job.unit_rows:
            found = f"{file.path}: tensor {job.source.name} has {job.source.data.shape[0]} rows, no multiple of a head's {job.unit_rows}"
            raise ModelError(found, hint="download it again")
    check_readable(file.path, [job.source for job in plan.jobs])
    return plan


def _plan_llama(file: GgufFile) -> ModelPlan:
    """Llama, SmolLM2 and Mistral."""
    config = _shared_config(file, "llama") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": _FIRST_BIAS in file.tensors,
        "mlp_bias": False,
        "rope_theta": field(file.fields, "llama.rope.freq_base", float, 10_000.0),
    }
    table = file.tensors.get(_ROPE_TABLE)
    scaling = _rope_scaling(file, "llama") if table is None else llama3_scaling(table.rows(0, 1).reshape(-1), config, file.path)
    config |= {} if scaling is None else {"rope_scaling": scaling}
    head_dim = config["head_dim"]

    def interleave_back(rows: Array) -> Array:
        """llama.cpp turns neighbours (0, 1), Hugging Face halves (0, D/2): undo its reordering of a head's rows."""
        return rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)

    jobs = _shared_jobs(file, config, {"q": interleave_back, "k": interleave_back}, None)
    return ModelPlan(config, tuple(jobs))


def _plan_qwen(file: GgufFile) -> ModelPlan:
    """Qwen2, Qwen2.5 and Qwen3 (dense): rows as Hugging Face has them, biases or norms of queries and keys."""
    architecture = field(file.fields, "general.architecture", str)
    config = _shared_config(file, architecture) | {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "hidden_act": "silu",
        "attention_bias": _FIRST_BIAS in file.tensors,
        "use_sliding_window": False,
        "rope_theta": field(file.fields, f"{architecture}.rope.freq_base", float, 10_000.0),
    }
    scaling = _rope_scaling(file, architecture)
    config |= {} if scaling is None else {"rope_scaling": scaling}
    return ModelPlan(config, tuple(_shared_jobs(file, config, {}, None)))


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
    scaling = _rope_scaling(file, "gemma3", "linear")
    config |= {} if scaling is None else {"rope_scaling": scaling}

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


def _rope_scaling(file: GgufFile, prefix: str, *kinds: str) -> dict[str, Any] | None:
    """As config.json has it; None: there is none."""
    kinds = kinds or ("linear", "yarn")
    kind = file.fields.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in kinds:
        raise ModelError(
            f"{file.path} has rope scaling {kind!r}, which is not converted",
            hint=f'converted: {", ".join(kinds)}; take the safetensors version of the model, or engine.backend = "llamacpp"',
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": field(file.fields, f"{prefix}.rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = field(file.fields, f"{prefix}.rope.scaling.original_context_length", int)
    return scaling


def llama3_scaling(table: Array, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """GGUF keeps the scaling of Llama 3.1 and later as a table of divisors, a frequency each: long waves have the factor itself. With
    that, the table has to come out again from the numbers that all of these models have.

    Raises:
        ModelError: it does not.
    """
    factor = float(table.max())
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = _LLAMA3_CONTEXT_TOKENS
    frequencies = config["rope_theta"] ** (-2.0 * numpy.arange(len(table)) / config["head_dim"])
    ramp = numpy.clip((_LLAMA3_CONTEXT_TOKENS * frequencies / (2 * numpy.pi) - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if len(table) != config["head_dim"] // 2 or not numpy.allclose(table, 1.0 / ((1.0 - ramp) / factor + ramp), rtol=1e-3):
        raise ModelError(
            f"{path} scales its rope by a table that is not Llama 3's",
            hint='take the safetensors version of the model, or engine.backend = "llamacpp"',
        )
    return scaling


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


_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")


def _shared_jobs(
    file: GgufFile, config: dict[str, Any], transforms: dict[str, Callable[[Array], Array]], norm: Callable[[Array], Array] | None
) -> list[TensorJob]:
    def job(source: str, name: str, kind: str) -> TensorJob:
        if source not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {source}", hint="it is incomplete: download it again")
        transform = norm if kind == "norm" else transforms.get(kind)
        return TensorJob(name, file.tensors[source], config["head_dim"] if kind in transforms else 1, transform)

    def bias(source: str, name: str, kind: str) -> TensorJob:
        """One row, whose numbers belong to the weight's rows."""
        of_rows = transforms.get(kind)
        return TensorJob(name, file.tensors[source], 1, of_rows and (lambda row: of_rows(row.reshape(-1, 1)).reshape(row.shape)))

    mlp_norm = "pre_feedforward_layernorm" if "blk.0.post_ffw_norm.weight" in file.tensors else "post_attention_layernorm"
    jobs = [job("token_embd.weight", "model.embed_tokens.weight", "embedding")]
    for index in range(config["num_hidden_layers"]):
        for source, name, kind in _LAYER:
            full = f"blk.{index}.{source}.weight"
            if full in file.tensors or source not in _OPTIONAL:
                jobs.append(job(full, f"model.layers.{index}.{name.format(mlp_norm=mlp_norm)}.weight", kind))
        for source, name, kind in _LAYER:
            if source in _BIASES and f"blk.{index}.{source}.bias" in file.tensors:
                jobs.append(bias(f"blk.{index}.{source}.bias", f"model.layers.{index}.{name}.bias", kind))
    jobs.append(job("output_norm.weight", "model.norm.weight", "norm"))
    if not config["tie_word_embeddings"]:
        jobs.append(job("output.weight", "lm_head.weight", "head"))
    used = {j.source.name for j in jobs} | {_ROPE_TABLE}
    left = sorted(set(file.tensors) - used)
    if left:
        raise ModelError(f"{file.path} has {len(left)} tensors that we do not know, such as {left[0]}", hint="take the safetensors version")
    return jobs


_PLANS: Mapping[str, Callable[[GgufFile], ModelPlan]] = {
    "llama": _plan_llama,
    "qwen2": _plan_qwen,
    "qwen3": _plan_qwen,
    "gemma3": _plan_gemma3,
}
