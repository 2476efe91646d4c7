"""The longest context of a GGUF file, out of its first key-value pairs. What a plan needs of it, appliance/planner/gguf.py reads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_KEY_MAX_BYTES = 1024
_VALUE_MAX_BYTES = 1024**2
_KEYS_READ = 64
"""They stand before the tokenizer's arrays, which are long."""


def context_length(file: Path) -> int:
    """0 where it does not say, or cannot be read."""
    try:
        with file.open("rb") as stream:
            return _context_length(stream)
    except (OSError, struct.error, ValueError):
        return 0


def _context_length(stream: BinaryIO) -> int:
    if stream.read(4) != MAGIC:
        return 0
    _version, _tensors, pairs = _number(stream, "I"), _number(stream, "Q"), _number(stream, "Q")
    for _ in range(min(pairs, _KEYS_READ)):
        key = _text(stream, _KEY_MAX_BYTES)
        kind = _number(stream, "I")
        if kind in _FIXED:
            value = _number(stream, _FIXED[kind])
            if key.endswith(b".context_length"):
                return int(value)
        elif kind == _STRING:
            _text(stream, _VALUE_MAX_BYTES)
        else:
            return 0
    return 0


def _number(stream: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))
    return value  # type: ignore[no-any-return]


def _text(stream: BinaryIO, most_bytes: int) -> bytes:
    length = _number(stream, "Q")
    if length > most_bytes:
        raise ValueError(f"a text of {length} bytes")
    return stream.read(length)
