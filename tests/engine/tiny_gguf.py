"""Tiny GGUF files, written by the `gguf` package from random transformers models the way llama.cpp's converter does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
import transformers

from tests.engine.test_tiny_models import save_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PLAIN = {"rope_type": "default", "rope_theta": 50_000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = transformers.LlamaConfig(**_SHAPE, rope_parameters=_PLAIN)
LLAMA3 = transformers.LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE, attention_bias=True)
QWEN2 = transformers.Qwen2Config(**_SHAPE, rope_parameters=_YARN)
QWEN3 = transformers.Qwen3Config(**_SHAPE, rope_parameters=_PLAIN, head_dim=32)
GEMMA3 = transformers.Gemma3TextConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=20,
    max_position_embeddings=256,
    initializer_range=0.3,
    tie_word_embeddings=False,
)

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, original: Path, config: Any, kind: gguf.GGMLQuantizationType, **fields: Any) -> Path:
    """The random model, saved in `original` for the oracle, and as GGUF with matrices of this type; `fields` override metadata."""
    save_checkpoint(config, original)
    architecture = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_shape_fields(config, architecture) | _vocabulary(config.vocab_size, architecture) | fields).items():
        if value is not None:
            _add(writer, key, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = _as_llama_cpp(name, tensor.numpy(), config, architecture)
        quantised = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name, architecture), gguf.quantize(data, quantised), raw_dtype=quantised)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, config.hidden_size // config.num_attention_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _divisors(rope: dict[str, Any], dim: int) -> numpy.ndarray:
    """As llama.cpp's converter spells Llama 3's scaling: 1 for short waves, the factor for long ones, between them by their length."""
    divisors = []
    for index in range(0, dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        divisors.append(1.0 if smooth > 1 else rope["factor"] if smooth < 0 else between)
    return numpy.array(divisors, dtype=numpy.float32)


def _gguf_name(name: str, architecture: str) -> str:
    stem, _, what = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, index, stem = stem.split(".", 3)
        prefix = f"blk.{index}."
    if stem == "post_attention_layernorm":
        return f"{prefix}{'post_attention_norm' if architecture == 'gemma3' else 'ffn_norm'}.{what}"
    return f"{prefix}{_NAMES[stem]}.{what}"


def _as_llama_cpp(name: str, data: numpy.ndarray, config: Any, architecture: str) -> numpy.ndarray:
    """Llama: each head's rows i and i + D/2 become neighbours, 2i and 2i + 1. Gemma: norms with the 1 added."""
    if architecture == "gemma3":
        return data + 1 if "norm" in name else data
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        order = [half * (dim // 2) + i for i in range(dim // 2) for half in range(2)]
        return data.reshape(-1, dim, data.size // data.shape[0])[:, order].reshape(data.shape).copy()
    return data


def _shape_fields(config: Any, prefix: str) -> dict[str, Any]:
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if prefix == "gemma3":
        values |= {"attention.key_length": config.head_dim, "attention.sliding_window": config.sliding_window}
        values |= {"rope.freq_base": 1_000_000.0}
    else:
        values |= {"rope.freq_base": 50_000.0}
    if prefix == "qwen3":
        values |= {"attention.key_length": config.head_dim}
    if config.rope_parameters.get("rope_type") == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    return {f"{prefix}.{key}": value for key, value in values.items()}


def _vocabulary(size: int, architecture: str) -> dict[str, Any]:
    """Enough of a tokenizer: letters, a few merges, control tokens."""
    letters = [chr(code) for code in range(33, 127)] if architecture != "gemma3" else [*map(chr, range(33, 127)), "\u2581"]
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *letters, "th", "the", "he", "ca", "cat"]
    kinds = [3, 3, 3, 3] + [1] * (len(tokens) - 4)
    tokens += [f"<extra{index}>" for index in range(size - len(tokens))]
    kinds += [4] * (size - len(kinds))
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": architecture == "gemma3",
    }
    if architecture != "gemma3":
        words = {"llama": "smollm"}.get(architecture, "qwen2")
        merges = ["t h", "th e", "h e", "c a", "ca t"]
        return fields | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": words, "tokenizer.ggml.merges": merges}
    scores = [0.0] * size
    for rank, token in enumerate(("th", "he", "the", "ca", "cat")):
        scores[tokens.index(token)] = -float(rank)
    return fields | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": False}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
