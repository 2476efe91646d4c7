"""The planner's one reader of files: a model folder, a config.json, a GGUF file or a name → ModelFacts.

Only headers are read, never tensors: a 60 GB model takes a few milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.core.errors import ModelError
from appliance.core.plan import ModelFacts
from appliance.planner.elements import SAFETENSORS_BITS
from appliance.planner.model_config import facts_from_config, text_config
from appliance.planner.weights import WeightBytes, tensor_bytes

CONFIG_LIMIT_BYTES = 64 * 2**20
"""Far more than any config.json, index or tokenizer_config.json has."""
HEADER_LIMIT_BYTES = 100_000_000
"""safetensors' own limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE): a longer header is a damaged length."""
_VISION_WORDS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "embed_vision.", "audio_tower.")


def model_facts(path: Path | str) -> ModelFacts:
    """The facts of a model folder, a bare config.json, or a GGUF file.

    Raises:
        ModelError: it is not there, half-written, or not a language model's.
    """
    where = Path(path)
    if where.suffix == ".gguf" and where.is_file():
        from appliance.planner.gguf import gguf_facts

        return gguf_facts(where)
    if where.is_dir():
        return _folder_facts(where)
    if not where.exists():
        raise ModelError(f"{where} does not exist", hint="name a model folder, a config.json, a .gguf file or a known model")
    return facts_from_config(_json_object(where), where.parent.name if where.name == "config.json" else where.stem)


def model_identity(path: Path | str) -> str:
    """Name and stamp of a model on this box: what was measured of one is not held to be true of another by the same name.

    The stamp is of config.json and of the names and sizes of the weights: a copy of the folder is the same model.

    Raises:
        ModelError: there is no such file or folder, or it may not be read.
    """
    import hashlib  # for plans of this box's own model alone

    where = Path(path)
    try:
        if where.is_file() and where.name == "config.json":
            where = where.parent
        files = sorted(where.iterdir()) if where.is_dir() else [where]
        weights = [f"{file.name} {file.stat().st_size}" for file in files if file.suffix in (".safetensors", ".gguf")]
        config = where / "config.json"
        text = config.read_bytes() if config.is_file() else b""
        name = where.resolve().name
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}", hint="name a model folder that is there") from error
    stamp = hashlib.sha256(text + "\n".join(weights).encode()).hexdigest()
    return f"{name}-{stamp[:12]}"


def _folder_facts(folder: Path) -> ModelFacts:
    config_file = folder / "config.json"
    if not config_file.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            from appliance.planner.gguf import gguf_facts

            return gguf_facts(ggufs[0])
        raise ModelError(f"{folder} holds no config.json", hint="a model is a folder with config.json, *.safetensors and tokenizer.json")
    config = _with_quantisation_file(_json_object(config_file), folder)
    return facts_from_config(config, folder.resolve().name, _weights(folder, config), chat_template=_has_template(folder))


def _with_quantisation_file(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """ModelOpt checkpoints keep their quantisation in a file of its own."""
    file = folder / "hf_quant_config.json"
    if "quantization_config" in config or not file.is_file():
        return config
    quantisation = _json_object(file).get("quantization")
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantisation}} if isinstance(quantisation, dict) else config


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(_json_object(file).get("chat_template"))


def _weights(folder: Path, config: Mapping[str, Any]) -> WeightBytes | None:
    """True bytes from the headers of all shards; None where there are no tensors at all."""
    shards = _shards(folder)
    if not shards:
        return None
    text = draft = vision = 0
    layers = int(text_config(config).get("num_hidden_layers") or 0)
    for shard in shards:
        for name, size in tensor_sizes(shard).items():
            if any(word in name for word in _VISION_WORDS):
                vision += size
            elif _is_draft(name, layers):
                draft += size
            else:
                text += size
    return WeightBytes(text, draft, vision)


def _shards(folder: Path) -> list[Path]:
    """The safetensors files; those that the index names where there is one.

    Raises:
        ModelError: the index names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    placed = _json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ModelError(f"{index} has no weight_map of tensor names to files", hint="download it again")
    names = sorted(set(placed.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        found = f"{len(missing)} of {len(names)} weight files of {folder} are missing, such as {missing[0]}"
        raise ModelError(found, hint="the download did not finish: bring them, or give the size with --weights and name the config.json")
    return [folder / name for name in names]


def _is_draft(name: str, layers: int) -> bool:
    """Multi-token-prediction tensors: named so, or layers after the last one (DeepSeek)."""
    if name.startswith(("mtp.", "model.mtp.")) or ".mtp." in name:
        return True
    _, _, rest = name.partition("layers.")
    number = rest.partition(".")[0]
    return bool(layers) and name.startswith("model.layers.") and number.isdigit() and int(number) >= layers


def tensor_sizes(shard: Path) -> dict[str, int]:
    """Tensor name → bytes, out of the header: eight bytes of length (little-endian), then that much JSON.

    Raises:
        ModelError: the file is cut off, is a Git LFS pointer, or its header is no safetensors header.
    """
    raw, size_bytes = _header_of(shard)
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        sizes = {name: tensor_bytes(entry["dtype"], entry["shape"]) for name, entry in tensors.items()}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        if min(sizes.values(), default=0) < 0:
            raise ValueError("a tensor of less than nothing")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        known = ", ".join(SAFETENSORS_BITS)
        raise ModelError(f"{shard}: the header cannot be read ({error})", hint=f"download it again; known dtypes: {known}") from error
    if size_bytes < 8 + len(raw) + end:
        found = f"{shard} is cut off: {size_bytes:,} bytes of {8 + len(raw) + end:,}"
        raise ModelError(found, hint="the download did not finish: bring it again")
    return sizes


def _header_of(shard: Path) -> tuple[bytes, int]:
    """The header's JSON, and how long the whole file is. Raises ModelError."""
    try:
        with shard.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise ModelError(f"{shard} is a Git LFS pointer, not the weights", hint="fetch the real file with `git lfs pull`")
            if len(start) < 8 or length > HEADER_LIMIT_BYTES:
                raise ModelError(f"{shard} is no safetensors file: its header would be {length:,} bytes", hint="download it again")
            return file.read(length), file.seek(0, 2)
    except OSError as error:
        raise ModelError(f"{shard} cannot be read: {error.strerror or error}", hint="make it readable for this user") from error


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(f"{file} is no file that can be read to its end", hint="name a model's config.json")
    try:
        with file.open("rb") as opened:
            raw = opened.read(CONFIG_LIMIT_BYTES + 1)
        if len(raw) > CONFIG_LIMIT_BYTES:
            found = f"{file} is larger than {CONFIG_LIMIT_BYTES // 2**20} MiB: that is no model's configuration"
            raise ModelError(found, hint="name a model's config.json, or its folder")
        value = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else f"it is no JSON ({error})" if raw else "it is empty"
        raise ModelError(f"{file} cannot be read: {why}", hint="it must be the config.json of a model: download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object", hint="name a model's config.json")
    return value
