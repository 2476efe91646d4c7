"""A model folder as it lies on disk: checked before a byte of it is used, then memory-mapped.

Nothing is copied for a float32 checkpoint: a restarted engine finds its weights in the page cache.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.core.errors import ModelError
from appliance.core.units import format_bytes
from appliance.engine.manifest import check_manifest
from appliance.engine.models.config import OTHER_ENGINES

_LFS_MAGIC = b"version https://git-lfs.github.com"
_AGAIN = "copy the folder again (the demo: `appliancectl setup --demo`)"
_LONGEST_HEADER_BYTES = 100 * 1024**2
"""safetensors' own limit."""

_LANGUAGE_MODEL = (("language_model.", ""), ("model.language_model.", "model."))
"""Before the names of its tensors, in older and newer files, and what stands there in files of a language model."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WouldCopy(Exception):
    """More than was allowed of this checkpoint cannot be used where it lies in the file."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: `begin` and `end` are bytes of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_config_json(folder: Path) -> dict[str, Any]:
    """config.json of a folder that is there and whole as far as its manifest says.

    Raises:
        ModelError: no folder, half-written, or no readable config.json.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist", hint="set model.path, or bring the demo: `appliancectl setup --demo`")
    check_manifest(folder)
    return _read_json(folder / "config.json")


class ModelWeights:
    """The tensors of one folder, memory-mapped; implements models.decoder.Weights."""

    def __init__(self, folder: Path, most_copied_bytes: int | None = None) -> None:
        """Check and map.

        Args:
            most_copied_bytes: `get` and `stacked` raise WouldCopy rather than copy more than this altogether; None: they may.

        Raises:
            ModelError: a shard is missing, cut off, or not what it says it is; the message names the file and the cure.
        """
        self._places: dict[str, TensorPlace] = {}
        for file in _weight_files(folder):
            self._places.update(read_header(file))
        self._places = _text_part(self._places)
        self._maps: dict[Path, Tensor] = {}
        self._most_copied_bytes = most_copied_bytes
        self._copied_bytes = 0

    @property
    def served_bytes(self) -> int:
        """What its tensors take as they are served, in float32."""
        return sum(math.prod(place.shape) for place in self._places.values()) * torch.float32.itemsize

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it."""
        return name in self._places

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in float32: a view of the file where it is stored so.

        Raises:
            ModelError: missing, or of another shape than config.json says.
        """
        place = self._place(name, shape)
        return self._view(place.file, place.begin, place.end, place.dtype).view(shape)

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor as it is stored, where it lies: for who reads a few rows of it. Raises as `get`."""
        place = self._place(name, shape)
        return self._piece(place.file, place.begin, place.end, place.dtype).view(shape)

    def stamps(self) -> list[tuple[str, int, int]]:
        """(name, size, time of the last change) of each file: another one is another checkpoint."""
        files = sorted({place.file for place in self._places.values()})
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def stacked(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Matrices on top of each other: one view where they lie so in the file (converted ones do), else a copy.

        Raises:
            ModelError: as `get`.
        """
        places = [self._place(name, (count, columns)) for name, count in zip(names, rows, strict=True)]
        first, last = places[0], places[-1]
        adjacent = all(a.file == b.file and a.end == b.begin and a.dtype == b.dtype for a, b in itertools.pairwise(places))
        if adjacent:
            return self._view(first.file, first.begin, last.end, first.dtype).view(sum(rows), columns)
        self._count_copy(sum(rows) * columns)
        return torch.cat([self.get(name, (count, columns)) for name, count in zip(names, rows, strict=True)])

    def _place(self, name: str, shape: tuple[int, ...]) -> TensorPlace:
        place = self._places.get(name)
        if place is None:
            raise ModelError(f"the checkpoint has no tensor {name}", hint=_AGAIN)
        if place.shape != shape:
            raise ModelError(
                f"{place.file}: tensor {name} has shape {list(place.shape)}, config.json implies {list(shape)}",
                hint="config.json and the weights are of different models",
            )
        return place

    def _view(self, file: Path, begin: int, end: int, dtype: str) -> Tensor:
        piece = self._piece(file, begin, end, dtype)
        if piece.dtype is not torch.float32:
            self._count_copy(piece.numel())
        return piece.float()

    def _piece(self, file: Path, begin: int, end: int, dtype: str) -> Tensor:
        if file not in self._maps:
            self._maps[file] = _map(file)
        piece, kind = self._maps[file][begin:end], _DTYPES[dtype]
        if begin % kind.itemsize:  # the format does not promise it
            self._count_copy((end - begin) // kind.itemsize)
            piece = piece.clone()
        return piece.view(kind)

    def _count_copy(self, numbers: int) -> None:
        self._copied_bytes += numbers * torch.float32.itemsize
        if self._most_copied_bytes is not None and self._copied_bytes > self._most_copied_bytes:
            raise WouldCopy(f"over {format_bytes(self._most_copied_bytes)} of the weights have to be copied before use")


def _map(file: Path) -> Tensor:
    """The whole file as bytes. Read-only: a stray write ends the process instead of changing the model."""
    with file.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)  # from a cold disk, the kernel reads ahead while the rest is set up
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Every tensor's place in one safetensors file, checked against the file's size.

    Raises:
        ModelError: not safetensors, cut off, a Git LFS pointer, or a dtype that the engine does not serve.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(len(_LFS_MAGIC))
        if start == _LFS_MAGIC:
            raise ModelError(
                f"{file} is a Git LFS pointer of {size_bytes} bytes, not the weights", hint="run `git lfs pull` in that folder"
            )
        header_bytes = int.from_bytes(start[:8], "little")
        if size_bytes < 8 or not 2 <= header_bytes <= min(size_bytes - 8, _LONGEST_HEADER_BYTES):
            raise ModelError(f"{file} is no safetensors file, or cut off after {format_bytes(size_bytes)}", hint=_AGAIN)
        handle.seek(8)
        text = handle.read(header_bytes)
    try:
        header = json.loads(text)
        places = {
            name: TensorPlace(
                file,
                entry["dtype"],
                tuple(int(n) for n in entry["shape"]),
                8 + header_bytes + int(entry["data_offsets"][0]),
                8 + header_bytes + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file} has a damaged header: {type(error).__name__}: {error}", hint=_AGAIN) from error
    for name, place in places.items():
        _check_place(name, place, size_bytes)
    return places


def _text_part(places: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Of a model that sees as well, the language model alone, by the names that it has where there is nothing else."""
    for prefix, alone in _LANGUAGE_MODEL:
        part = {alone + name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)}
        if part:
            return part | {name: place for name, place in places.items() if name == "lm_head.weight"}
    return places


def _check_place(name: str, place: TensorPlace, size_bytes: int) -> None:
    if place.dtype not in _DTYPES:
        raise ModelError(
            f"{place.file}: tensor {name} is stored as {place.dtype}, which the built-in engine does not serve",
            hint=f"supported: {', '.join(_DTYPES)}; take the unquantised model, or {OTHER_ENGINES}",
        )
    if place.end > size_bytes:
        raise ModelError(
            f"{place.file} is cut off: it has {size_bytes} bytes and tensor {name} ends at byte {place.end}",
            hint=_AGAIN,
        )
    needed = math.prod(place.shape) * _DTYPES[place.dtype].itemsize
    if place.begin < 0 or place.end - place.begin != needed:
        raise ModelError(f"{place.file}: tensor {name} takes {place.end - place.begin} bytes, its shape needs {needed}", hint=_AGAIN)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, Mapping) or not names:
            raise ModelError(f"{index} has no weight_map", hint=_AGAIN)
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:5])}", hint=_AGAIN)
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json", hint=_what_lies_there(folder))
    return [single]


def _what_lies_there(folder: Path) -> str:
    for pattern, cure in (
        ("*.gguf", "convert it: python -m appliance.engine.convert {} OUT_DIR"),
        ("*.bin", "{} is a pickle: take the safetensors version of the model"),
        ("*.incomplete", "{} is an unfinished download: finish it"),
        ("*.part", "{} is an unfinished download: finish it"),
    ):
        found = sorted(folder.glob(pattern))
        if found:
            return cure.format(found[0])
    return _AGAIN


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", hint=_AGAIN) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=_AGAIN) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object", hint=_AGAIN)
    return value
