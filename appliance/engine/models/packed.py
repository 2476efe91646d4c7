"""Matrices in 8 bits as kernels/x86 reads them: made of a checkpoint once, kept in a file beside it, mapped from then on.

The file is `.int8-FORMAT` in the model's folder: a page of JSON that says of what it was made, then all matrices. Where the folder
cannot be written, the matrices lie in memory of our own, made anew at each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.core.units import format_bytes
from appliance.engine.models.config import DecoderConfig
from appliance.engine.weights import ModelWeights, WouldCopy
from appliance_kernels.x86.library import GROUP, PANEL, Matrix, address, library

FORMAT = 2
"""Raised when the layout changes: older files are then made anew."""
_HEADER_BYTES = mmap.PAGESIZE
_LINE_BYTES = 64

log = logging.getLogger("appliance.engine.models.packed")


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one matrix: the checkpoint's tensors that are stacked in it, and where its numbers and scales begin."""

    names: tuple[str, ...]
    heights: tuple[int, ...]
    columns: int
    packed_at: int
    scales_at: int
    end: int

    @property
    def rows(self) -> int:
        """Full panels."""
        return -(-sum(self.heights) // PANEL) * PANEL


def layer_names(index: int) -> tuple[str, str, str, str]:
    """What the four matrices of a layer are called."""
    return (f"{index}.qkv", f"{index}.out", f"{index}.gate_up", f"{index}.down")


class Packed:
    """Owns the memory.

    Attributes:
        memory: all matrices, as bytes.
        total_bytes: of all matrices.
        mapped: from a file, shared with whoever else maps it.
    """

    def __init__(self, memory: Tensor, places: dict[str, _Place], mapped: bool) -> None:
        self.memory = memory
        self._places = places
        self.mapped = mapped
        self.total_bytes = memory.shape[0]

    def matrix(self, name: str) -> Matrix:
        """The structure, without a bias; valid as long as this lives."""
        place, base = self._places[name], self.memory.data_ptr()
        return Matrix(base + place.packed_at, base + place.scales_at, None, place.rows, place.columns)


def load_packed(folder: Path, config: DecoderConfig, weights: ModelWeights, may_copy: bool = True) -> Packed:
    """Map what is there, or make it.

    Raises:
        WouldCopy: it would be in memory of our own, and may not.
        ModelError: a tensor is missing or has another shape than the configuration says.
    """
    places = _places(config)
    file, size, header = folder / f".int8-{FORMAT}", next(reversed(places.values())).end, _header(config, weights)
    found = _map(file, header, size)
    if found is not None:
        return Packed(found, places, mapped=True)
    if not may_copy:
        raise WouldCopy(f"{format_bytes(size)} of 8-bit weights are not in {file}")
    memory = torch.empty(size, dtype=torch.uint8)
    for place in places.values():
        _pack(weights, place, memory)
    try:
        _write(file, header, memory)
    except OSError as error:
        log.info("The 8-bit weights are not kept: %s: %s", file, error.strerror)
        return Packed(memory, places, mapped=False)
    found = _map(file, header, size)
    return Packed(memory, places, mapped=False) if found is None else Packed(found, places, mapped=True)


def packed_bytes(config: DecoderConfig) -> int:
    """What all matrices take."""
    return next(reversed(_places(config).values())).end


def packed_over(memory: Tensor, config: DecoderConfig) -> Packed:
    """Over what somebody else has made of the same configuration, in this FORMAT, and keeps in memory that is shared."""
    return Packed(memory, _places(config), mapped=True)


def _places(config: DecoderConfig) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    at = 0
    for name, tensors, heights, columns in _matrices(config):
        rows = -(-sum(heights) // PANEL) * PANEL
        scales_at = at + rows * columns
        end = -(-(scales_at + rows * columns // GROUP * 2) // _LINE_BYTES) * _LINE_BYTES
        places[name] = _Place(tensors, heights, columns, at, scales_at, end)
        at = end
    return places


def _matrices(config: DecoderConfig) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], int]]:
    """(name, tensors, their heights, columns) in the order in which a pass reads them."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for index in range(len(config.layers)):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv, out, gate_up, down = layer_names(index)
        yield qkv, tuple(f"{attention}{one}_proj.weight" for one in "qkv"), (q_rows, kv_rows, kv_rows), hidden
        yield out, (attention + "o_proj.weight",), (hidden,), q_rows
        yield gate_up, (mlp + "gate_proj.weight", mlp + "up_proj.weight"), (wide, wide), hidden
        yield down, (mlp + "down_proj.weight",), (hidden,), wide
    yield "head", ("model.embed_tokens.weight" if config.tied_embedding else "lm_head.weight",), (config.vocab_size,), hidden


def _pack(weights: ModelWeights, place: _Place, memory: Tensor) -> None:
    loaded = library()
    assert loaded is not None, "see int8_decoder.why_not"
    matrix = weights.stacked(place.names, place.heights, place.columns) if len(place.names) > 1 else weights.get(
        place.names[0], (place.heights[0], place.columns)
    )  # fmt: skip
    base = memory.data_ptr()
    loaded.pack(address(matrix.contiguous()), matrix.shape[0], place.columns, base + place.packed_at, base + place.scales_at)


def _header(config: DecoderConfig, weights: ModelWeights) -> bytes:
    """Of what it is made: other weights or another reading of config.json make another one."""
    said = {"format": FORMAT, "config": hashlib.sha256(repr(config).encode()).hexdigest(), "files": weights.stamps()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return json.dumps({"what": "8-bit weights of this folder's checkpoint; made by the engine, safe to delete", "of": digest}).encode()


def _map(file: Path, header: bytes, size: int) -> Tensor | None:
    """The matrices, read-only; None: not there, or of something else."""
    try:
        with file.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size != _HEADER_BYTES + size or handle.read(len(header) + 1) != header + b"\n":
                return None
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    mapped.madvise(mmap.MADV_WILLNEED)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)[_HEADER_BYTES:]


def _write(file: Path, header: bytes, memory: Tensor) -> None:
    """Durably and at once: a file by this name is whole. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as handle:
            handle.write((header + b"\n").ljust(_HEADER_BYTES, b"\0"))
            handle.write(memory.numpy().data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
