"""What is held of a checkpoint, and a decoder over it: the holder's side and the engine's beside each other.

In float32 it is what a decoder asks for, by the names it asks by. In 8 bits it is the packed matrices as one piece, in the layout of our
own kernels; the rest is small and read from the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from appliance.engine.models.config import DecoderConfig
from appliance.engine.models.decoder import Decoder, Weights
from appliance.engine.models.int8_decoder import Int8Decoder, why_not
from appliance.engine.models.packed import FORMAT, load_packed, packed_bytes, packed_over
from appliance.engine.weight_holder_block import Piece
from appliance.engine.weights import ModelWeights

_PACKED = f"matrices in 8 bits, format {FORMAT}"


class Held(Weights, Protocol):
    """What can be had of a holder's block."""

    def tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One piece, where it lies."""


@dataclass
class _Listener:
    """Weights without memory, which notes what a decoder asks for. So the layout is the decoder's own, of whatever family."""

    weights: Weights
    heard: dict[str, Piece] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """As the checkpoint has it."""
        return self.weights.has(name)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Nothing but a shape."""
        return self._note(name, shape, partial(self.weights.get, name, shape))

    def stacked(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Nothing but a shape."""
        return self._note(stack_key(names), (sum(rows), columns), partial(self.weights.stacked, names, rows, columns))

    def _note(self, key: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Tensor:
        self.heard[key] = Piece(key, shape, torch.float32, read)
        return torch.empty(shape, dtype=torch.float32, device="meta")


def stack_key(names: tuple[str, ...]) -> str:
    """Of matrices on top of each other; no tensor's name has a space in it."""
    return " ".join(names)


def pieces_of(folder: Path, config: DecoderConfig, weights: ModelWeights, dtype: str) -> tuple[Piece, ...]:
    """Everything to be held, in a decoder's order.

    Args:
        dtype: as in EngineSettings.
    """
    if dtype == "int8" and why_not(config) is None:
        return (Piece(_PACKED, (packed_bytes(config),), torch.uint8, lambda: load_packed(folder, config, weights).memory),)
    listener = _Listener(weights)
    Decoder(config, listener)
    return tuple(listener.heard.values())


def decoder_over(held: Held, folder: Path, config: DecoderConfig, dtype: str) -> Decoder | Int8Decoder:
    """As the engine would have it without a holder. Raises what `held` raises, and ModelError."""
    if dtype == "int8" and why_not(config) is None:
        matrices = held.tensor(_PACKED, (packed_bytes(config),), torch.uint8)
        return Int8Decoder(config, ModelWeights(folder), packed_over(matrices, config))
    return Decoder(config, held)
