"""What the engines of the GPU need to know of a model's folder before they start: that it is whole, and two facts of its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.config.schema import Config
from appliance.core.errors import ModelError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Of config.json; 0 and False where it does not say."""

    context_tokens: int = 0
    has_linear_layers: bool = False


def checked_folder(config: Config) -> Path:
    """The folder of a Hugging Face model. Raises ModelError."""
    folder = named_path(config)
    if not folder.is_dir():
        raise ModelError(f"model.path = {config.model.path!r} is no folder", hint="name the folder that holds config.json and the weights")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [] if any((folder / name).is_file() for name in _TOKENIZERS) else ["a tokenizer (tokenizer.json)"]
    missing += [] if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS) else ["weights (*.safetensors)"]
    if missing:
        raise ModelError(f"the model folder {folder} lacks {' and '.join(missing)}", hint="its download is not complete: do it again")
    return folder.resolve()


def named_path(config: Config) -> Path:
    """model.path, which is there. Raises ModelError."""
    if not config.model.path:
        raise ModelError("model.path is not set", hint="name the model in appliance.toml")
    path = Path(config.model.path)
    if not path.exists():
        raise ModelError(f"model.path = {config.model.path!r} does not exist", hint="correct it")
    return path


def folder_facts(folder: Path) -> FolderFacts:
    """Read quickly, judged by nobody: what is missing is not known."""
    try:
        document: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return FolderFacts()
    text = document.get("text_config", document) if isinstance(document, dict) else {}
    if not isinstance(text, dict):
        return FolderFacts()
    context = text.get("max_position_embeddings")
    layers = text.get("layer_types")
    linear = isinstance(layers, list) and any("linear" in str(layer) or "mamba" in str(layer) for layer in layers)
    known = context if isinstance(context, int) and not isinstance(context, bool) else 0
    return FolderFacts(known, linear or "linear_num_value_heads" in text)
