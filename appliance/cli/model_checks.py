"""Whether a model's files are whole, by their headers and sizes: a download that was cut short is found before an engine finds it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from appliance.core.errors import ModelError
from appliance.core.plan import ModelFacts
from appliance.planner.model_files import HEADER_LIMIT_BYTES, model_facts

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_POINTER = b"version https://git-lfs.github.com/spec/"
_GGUF = b"GGUF"


def checked_facts(path: Path) -> ModelFacts:
    """Of a whole model folder or GGUF file.

    Raises:
        ModelError: all that is wrong with it, in one sentence.
    """
    if not path.exists():
        raise ModelError(f"{path} does not exist", hint="name a model folder, or gguf:FILE")
    ggufs = [path] if path.is_file() else ([] if (path / "config.json").exists() else sorted(path.glob("*.gguf")))
    found = [trouble for file in ggufs for trouble in _troubles_of_file(file)] if ggufs else list(_troubles_of_folder(path))
    if found:
        raise ModelError(f"{path} is not whole: {'; '.join(found)}", hint="download it again, or copy all of it")
    return model_facts(path)


def _troubles_of_file(file: Path) -> Iterator[str]:
    start = _start(file)
    if start.startswith(_POINTER):
        yield f"{file.name} is a Git LFS pointer, not the file (git lfs pull)"
    elif not start.startswith(_GGUF):
        yield f"{file.name} is no GGUF file"


def _troubles_of_folder(folder: Path) -> Iterator[str]:
    names = {entry.name for entry in folder.iterdir()}
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if "config.json" not in names:
        yield "there is no config.json"
    if not names.intersection(TOKENIZERS):
        yield "there is no tokenizer (tokenizer.json)"
    if not weights:
        yield "there are no weights (*.safetensors)"
    for name in sorted(names):
        if name.endswith(".json"):
            yield from _troubles_of_json(folder / name)
    yield from (f"{name} is missing" for name in sorted(_shards(folder) - names))
    for name in weights:
        yield from _troubles_of_weights(folder / name)


def _troubles_of_json(file: Path) -> Iterator[str]:
    try:
        json.loads(file.read_bytes())
    except OSError as error:
        yield f"{file.name} cannot be read: {error.strerror}"
    except ValueError:
        yield f"{file.name} is a Git LFS pointer" if _start(file).startswith(_POINTER) else f"{file.name} is no JSON"


def _shards(folder: Path) -> set[str]:
    """The files that the index of a model in several names."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()  # none, or told of already


def _troubles_of_weights(file: Path) -> Iterator[str]:
    """8 bytes of length, a JSON header of that length, and the tensors that it describes: no more, no less."""
    start = _start(file)
    if start.startswith(_POINTER):
        yield f"{file.name} is a Git LFS pointer, not the file (git lfs pull)"
        return
    size_bytes = file.stat().st_size
    header_bytes = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else HEADER_LIMIT_BYTES + 1
    if header_bytes > HEADER_LIMIT_BYTES or 8 + header_bytes > size_bytes:
        yield f"{file.name} is no safetensors file, or cut short within its header ({size_bytes:,} bytes)"
        return
    try:
        with file.open("rb") as stream:
            stream.seek(8)
            header = json.loads(stream.read(header_bytes))
        data_bytes = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        yield f"{file.name} has a damaged header"
        return
    expected = 8 + header_bytes + data_bytes
    if size_bytes != expected:
        yield f"{file.name} has {size_bytes:,} bytes of {expected:,}"


def _start(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(64)
    except OSError:
        return b""
