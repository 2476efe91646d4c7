"""GGUF headers → ModelFacts. The layout is ggml's docs/gguf.md: magic, version, counts, key-value pairs, tensor infos; little-endian."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.core.errors import ModelError
from appliance.core.plan import ModelFacts
from appliance.planner.model_config import facts_from_config
from appliance.planner.weights import WeightBytes

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TYPES: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""ggml tensor type → (numbers of a block, bytes of a block), from ggml.c's type table."""


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.number("Q")
        start, self.at = self.at, self.at + length
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self.number(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:  # a vocabulary: skipped, its length is what counts
            for _ in range(count):
                if self.at >= len(self.data):
                    raise ValueError("it ends inside a list")
                self.at += 8 + int.from_bytes(self.data[self.at : self.at + 8], "little")
            return range(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        start, self.at = self.at, self.at + count * struct.calcsize(_SCALARS[kind])
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start)) if count <= 4096 else range(count)


def gguf_facts(file: Path) -> ModelFacts:
    """The facts of a GGUF file; of all its parts where it is split.

    Raises:
        ModelError: it is no GGUF file, is cut off, or one of its parts is missing.
    """
    pairs: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for part in _parts(file):
        more, tensors = _header(part)
        pairs = {**more, **pairs}
        sizes.update(tensors)
    config = _as_config(pairs)
    embedding = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    draft = sum(size for name, size in sizes.items() if ".nextn." in name)
    facts = facts_from_config(
        config,
        str(pairs.get("general.name") or file.stem),
        WeightBytes(sum(sizes.values()) - draft, draft, 0),
        chat_template=_templated(pairs),
    )
    return replace(facts, host_weight_bytes=embedding, weights_from="GGUF headers", quantisation=_file_type(pairs))


def _parts(file: Path) -> list[Path]:
    match = _SPLIT.search(file.name)
    if match is None:
        return [file]
    stem = file.name[: match.start()]
    parts = [file.with_name(f"{stem}-{number:05d}-of-{match[2]}.gguf") for number in range(1, int(match[2]) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{len(missing)} of {len(parts)} parts are missing, such as {missing[0]}", hint="the download did not finish")
    return parts


def _header(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Key-value pairs, and tensor name → bytes."""
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise ModelError(f"{file} is no GGUF file: it starts with {data[:4]!r}", hint="download it again")
            reader = _Reader(data)
            reader.at = 4
            version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
            if version < 2:
                raise ModelError(f"{file} is GGUF version {version}; 2 and later are read", hint="convert it with a newer llama.cpp")
            found = {reader.text(): reader.value(reader.number("I")) for _ in range(pairs)}
            return found, dict(_tensor(reader) for _ in range(tensors))
    except (struct.error, KeyError, ValueError, OSError, OverflowError, RecursionError) as error:
        raise ModelError(f"{file}: the GGUF header cannot be read ({error})", hint="the download did not finish: bring it again") from error


def _tensor(reader: _Reader) -> tuple[str, int]:
    name = reader.text()
    elements = 1
    for _ in range(reader.number("I")):
        elements *= reader.number("Q")
    block, size = _TYPES[reader.number("I")]
    reader.number("Q")  # offset
    return name, elements // block * size


def _as_config(pairs: dict[str, Any]) -> dict[str, Any]:
    """GGUF's keys in config.json's words."""
    architecture = str(pairs.get("general.architecture", ""))

    def key(name: str) -> Any:
        value = pairs.get(f"{architecture}.{name}")
        return max(value, default=None) if isinstance(value, list | range) else value

    layers, heads = key("block_count"), key("attention.head_count")
    layers = (layers or 0) - (key("nextn_predict_layers") or 0)
    config = {
        "architectures": [architecture],
        "model_type": architecture,
        "num_hidden_layers": layers,
        "hidden_size": key("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv") or heads,
        "head_dim": key("attention.key_length"),
        "v_head_dim": key("attention.value_length"),
        "intermediate_size": key("feed_forward_length"),
        "max_position_embeddings": key("context_length"),
        "vocab_size": key("vocab_size") or len(pairs.get("tokenizer.ggml.tokens") or ()),
        "num_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "sliding_window": key("attention.sliding_window"),
        "kv_lora_rank": key("attention.kv_lora_rank"),
        "num_nextn_predict_layers": key("nextn_predict_layers"),
    }
    config.update(_kinds(pairs, architecture, layers))
    return {name: value for name, value in config.items() if value is not None}


def _kinds(pairs: dict[str, Any], architecture: str, layers: int) -> dict[str, Any]:
    """Which layers are linear or slide, and the shape of a linear layer (ssm.*, llama-hparams.cpp, n_embd_r and n_embd_s)."""
    per_layer = pairs.get(f"{architecture}.attention.head_count_kv")
    inner = pairs.get(f"{architecture}.ssm.inner_size")
    if inner:
        state, groups = pairs[f"{architecture}.ssm.state_size"], pairs.get(f"{architecture}.ssm.group_count", 1)
        interval = pairs.get(f"{architecture}.full_attention_interval", 4)
        kinds = ["attention" if heads else "mamba" for heads in per_layer] if isinstance(per_layer, list) else None
        return {
            "layer_types": kinds or ["attention" if (i + 1) % interval == 0 else "mamba" for i in range(layers)],
            "mamba_d_ssm": inner,
            "mamba_n_heads": pairs.get(f"{architecture}.ssm.time_step_rank", 1),
            "mamba_n_groups": groups,
            "mamba_d_state": state,
            "mamba_d_conv": pairs.get(f"{architecture}.ssm.conv_kernel", 4),
        }
    pattern = pairs.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    family = {"gemma3": "gemma3_text", "gemma2": "gemma2", "gpt-oss": "gpt_oss", "cohere2": "cohere2", "gemma4": "gemma4_text"}
    return {"model_type": family.get(architecture, architecture), **({"sliding_window_pattern": pattern} if pattern else {})}


def _templated(pairs: dict[str, Any]) -> bool:
    return bool(pairs.get("tokenizer.chat_template"))


def _file_type(pairs: dict[str, Any]) -> str:
    number = pairs.get("general.file_type")
    return "GGUF" if number is None else f"GGUF file type {number}"
