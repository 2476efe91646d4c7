"""A GGUF file: its metadata and where its tensors lie.

The `gguf` package has a reader too, and makes one numpy view a vocabulary entry (9 s for Gemma's); this one takes a second
and says what is wrong with a damaged file. The numbers inside the tensors are decoded by that package.

Layout: magic, version, tensor count, key count; key-value pairs; tensor infos; padding; data. Little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from appliance.core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type → struct format."""
_OTHERS = 'take another quantisation (Q4_K_M, Q8_0, F16), or engine.backend = "llamacpp"'


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor.

    Attributes:
        shape: outermost dimension first, as torch has it (GGUF stores the reverse).
        data: uint8, [rows, bytes of a row].
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[numpy.uint8]

    def rows(self, begin: int, end: int) -> NDArray[numpy.float32]:
        """Some rows, decoded; a vector is one row."""
        decoded: NDArray[numpy.float32] = dequantize(self.data[begin:end], self.kind)
        return decoded


class GgufFile:
    """Memory-mapped.

    Attributes:
        fields: metadata by key; arrays are lists.
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Read everything but the tensors' numbers.

        Raises:
            ModelError: missing, no GGUF, of a version or with a tensor type that we cannot read, or cut off.
        """
        self.path = path
        try:
            self._bytes = numpy.memmap(path, numpy.uint8, "r")
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist", hint="give the path of a .gguf file") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self._view = memoryview(self._bytes)  # type: ignore[arg-type]  # numpy's stubs do not know the buffer protocol
        self._cursor = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ModelError(
                f"{path} is damaged or cut off: byte {self._cursor} of {self._bytes.size}: {type(error).__name__}: {error}",
                hint="download it again",
            ) from error

    def _read(self) -> None:
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self.path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        self.fields: Mapping[str, Any] = {self._string(): self._value(self._number("I")) for _ in range(field_count)}
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        base = -(-self._cursor // alignment) * alignment
        self.tensors: Mapping[str, GgufTensor] = {
            name: self._tensor(name, shape, kind, base + offset) for name, shape, kind, offset in infos
        }

    def _take(self, count: int) -> bytes:
        piece = bytes(self._view[self._cursor : self._cursor + count])
        if len(piece) < count:
            raise struct.error(f"{count} bytes wanted, {len(piece)} left")
        self._cursor += count
        return piece

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        item_kind, count = self._number("I"), self._number("Q")
        if item_kind in _SCALARS:
            code = f"{count}{_SCALARS[item_kind]}"
            return list(struct.unpack("<" + code, self._take(struct.calcsize("<" + code))))
        return [self._value(item_kind) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._number("Q") for _ in range(self._number("I"))]
        return name, tuple(reversed(dimensions)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind_number: int, begin: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(kind_number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} is of type {kind_number}, which is not converted", hint=_OTHERS) from None
        if not shape or min(shape) < 1:
            raise ModelError(f"{self.path}: tensor {name} has the shape {shape}: no numbers at all", hint="download it again")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        end = begin + rows * row_bytes
        if end > self._bytes.size:
            raise ModelError(
                f"{self.path} is cut off: it has {self._bytes.size} bytes and tensor {name} ends at byte {end}", hint="download it again"
            )
        return GgufTensor(name, kind, shape, self._bytes[begin:end].reshape(rows, row_bytes))


def check_readable(path: Path, tensors: Iterable[GgufTensor]) -> None:
    """A row of each quantisation, before anything is written.

    Raises:
        ModelError: one that cannot be decoded here.
    """
    for kind, tensor in {tensor.kind: tensor for tensor in tensors}.items():
        try:
            tensor.rows(0, 1)
        except NotImplementedError:
            raise ModelError(
                f"{path}: tensor {tensor.name} is quantised as {kind.name}, which is not converted",
                hint=_OTHERS,
            ) from None


def field(fields: Mapping[str, Any], key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
    """One metadata value, converted.

    Raises:
        ModelError: missing without a default, or of another kind.
    """
    value = fields.get(key, default)
    if value is None:
        raise ModelError(f"the GGUF file has no {key}", hint="it is incomplete: take another conversion of the model")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ModelError(f"the GGUF file's {key} is {str(value)[:80]!r}, expected {kind.__name__}") from None
