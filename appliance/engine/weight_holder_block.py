"""One block of memory with everything that a decoder wants, and a manifest of what lies where. docs/adr/0082-weight-holder.md.

    checksum of an entry = SHA-256(r₀ r₁ r₂ …),  rᵢ = Σ of the 512 words of 64 bits in its i-th page, modulo 2⁶⁴

A flipped bit changes its page's sum by a power of two, so it is always found; so is anything else that is written into a page, unless
its words cancel each other exactly. One reduction over the block computes it where the block lies, on a card at its memory's speed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

FORMAT = 1
"""Raised when layout or checksum change: an engine of another version then loads by itself."""
PAGE_BYTES = 4096
"""Entries begin at multiples of it; what is left of an entry's last page is zero."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one entry is made of; `read` raises ModelError."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a piece lies in the block, and what it must be: the checksum is of what was read, not of what arrived."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    checksum: str

    @property
    def end(self) -> int:
        """Of its last page."""
        return self.begin + page_bytes(self.shape, getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of a whole block. `model`: see `model_digest`."""

    model: str
    block_bytes: int
    entries: tuple[Entry, ...]
    format: int = FORMAT

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises ValueError: another format, or no manifest."""
        value = json.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"its manifest is not of format {FORMAT}")
        try:
            entries = tuple(Entry(one["key"], one["dtype"], tuple(one["shape"]), one["begin"], one["checksum"]) for one in value["entries"])
            return cls(value["model"], value["block_bytes"], entries)
        except (KeyError, TypeError) as error:
            raise ValueError(f"its manifest lacks {error}") from error


def page_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """What a tensor takes in the block."""
    return -(-math.prod(shape) * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


def block_bytes(pieces: Iterable[Piece]) -> int:
    """What all of them take."""
    return sum(page_bytes(piece.shape, piece.dtype) for piece in pieces)


def fill(block: Tensor, pieces: Iterable[Piece], model: str, tell: Callable[[int], None]) -> Manifest:
    """Copy all of them into the block, one after the other.

    Args:
        block: bytes, zero, as many as `block_bytes` says.
        model: see `model_digest`.
        tell: called with the bytes that are done, after each.

    Raises:
        ModelError: a tensor is missing or has another shape than the configuration says.
    """
    entries, at = [], 0
    for piece in pieces:
        tensor = piece.read().contiguous()
        size = page_bytes(piece.shape, piece.dtype)
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
        block[at : at + size].copy_(padded)
        entries.append(Entry(piece.key, str(piece.dtype).removeprefix("torch."), piece.shape, at, checksum(padded)))
        at += size
        tell(at)
    return Manifest(model, at, tuple(entries))


def checksum(pages: Tensor) -> str:
    """See the module. `pages`: whole ones, as bytes, on any device."""
    sums = pages.view(torch.int64).view(-1, PAGE_BYTES // 8).sum(1)
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()


def damaged(block: Tensor, manifest: Manifest) -> tuple[str, ...]:
    """The keys of entries that are not what they must be."""
    return tuple(entry.key for entry in manifest.entries if checksum(block[entry.begin : entry.end]) != entry.checksum)


def model_digest(folder: Path) -> str:
    """Changes whenever a file of the checkpoint is replaced or written."""
    said = []
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        status = file.stat()
        said.append(f"{file.name} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
