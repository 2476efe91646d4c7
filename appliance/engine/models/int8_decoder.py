"""The same transformer as decoder.py, with weights in 8 bits: a pass is one call of the compiled library (kernels/x86).

A row's numbers are its own, whatever else is in the step, as docs/adr/0002-batch-invariance.md wants; they are not those of
float32: docs/adr/0090-eight-bit-weights.md has what is lost and what is won.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.engine.kv_cache import CacheCorrupt, KvCache
from appliance.engine.models.config import DecoderConfig
from appliance.engine.models.decoder import inverse_frequencies, norm_weight, optional, qk_norm_weight, qkv_bias
from appliance.engine.models.packed import Packed, layer_names
from appliance.engine.weights import ModelWeights
from appliance_kernels.kv_write.reference import Guard, WritePlan
from appliance_kernels.rope.reference import rope_turn
from appliance_kernels.x86.library import GROUP, PANEL, Layer, Model, Step, address, apply_bytes, library

KEYS = 16
"""Attention reads a table up to a multiple of so many keys."""
_KEPT_WORKSPACE_BYTES = 16 * 1024**2
_FIRST_TURNS = 1024


def why_not(config: DecoderConfig) -> str | None:
    """What keeps this model on this machine from 8-bit weights; None: nothing."""
    if library() is None:
        return "no compiled library of ours runs on this processor"
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "heads": config.heads * config.head_dim}
    for name, width in widths.items():
        if width % GROUP:
            return f"{name} of {width} is no multiple of {GROUP}"
    return f"head_dim of {config.head_dim} is no multiple of {PANEL}" if config.head_dim % PANEL else None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step: `count` rows from `begin` on, at positions from `start` on; its blocks, checked."""

    begin: int
    count: int
    start: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Paging:
    """Who reads what in a step, and what is kept where.

    Attributes:
        segments: [spans, 4], int32: begin, count, start, where the table begins.
        rows, blocks, offsets: [n], int64, of what is kept.
        most_keys: the longest that a row looks back.
    """

    segments: Tensor
    tables: Tensor
    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    most_keys: int

    @classmethod
    def of(cls, spans: Sequence[Span], writes: Sequence[WritePlan], block_tokens: int, null_block: int) -> Paging:
        """Tables are filled up to whole tiles of keys with the null block.

        Args:
            writes: one for all spans, or one a span; rows count from the span's begin.
        """
        segments: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        most_keys = 0
        for span in spans:
            segments.append((span.begin, span.count, span.start, len(tables)))
            keys = -(-(span.start + span.count) // KEYS) * KEYS
            tables += span.table
            tables += [null_block] * (-(-keys // block_tokens) - len(span.table))
            most_keys = max(most_keys, keys)
        begins = [0] if len(writes) == 1 else [span.begin for span in spans]
        rows = [
            (torch.arange(write.blocks.shape[0]) if write.rows is None else write.rows) + begin
            for write, begin in zip(writes, begins, strict=True)
        ]
        return cls(
            segments=torch.tensor(segments, dtype=torch.int32),
            tables=torch.tensor(tables, dtype=torch.int32),
            rows=_joined(rows),
            blocks=_joined([write.blocks for write in writes]),
            offsets=_joined([write.offsets for write in writes]),
            most_keys=most_keys,
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()


class Int8Decoder:
    """Owns the weights.

    Attributes:
        config: what it is.
        weight_bytes: what they take.
    """

    def __init__(self, config: DecoderConfig, weights: ModelWeights, packed: Packed) -> None:
        """Take the matrices from `packed`, the rest by name.

        Raises:
            ModelError: a tensor is missing or has another shape than the configuration says.
        """
        loaded = library()
        assert loaded is not None, "see why_not"
        self._library = loaded
        self.config = config
        self.weight_bytes = packed.total_bytes
        self._packed = packed
        self._kept: list[Tensor] = []  # whatever the structures point to
        self._embedding = weights.stored("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._norm = norm_weight(weights, "model.norm.weight", config.hidden_size, config)
        self._head = packed.matrix("head")
        specs = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._frequencies = [inverse_frequencies(spec, config.head_dim) for spec in specs]
        self._turns: list[Tensor] = []
        turn_of_layer = [specs.index(layer.rope) for layer in config.layers]
        self._layers = (Layer * len(config.layers))(*(self._layer(weights, index, turn) for index, turn in enumerate(turn_of_layer)))
        self._model = Model(
            self._layers,
            *(len(config.layers), config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim),
            int(config.activation == "gelu_tanh"),
            config.norm_eps,
            config.attention_scale,
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def set_threads(self, threads: int) -> None:
        """How many threads compute a pass, for all decoders of this process. They have the priority of whoever calls this first."""
        self._library.set_threads(threads)

    def forward(self, token_ids: Tensor, positions: Tensor, paging: Paging, cache: KvCache, guard: Guard) -> Tensor:
        """All layers over some tokens, of any mixture of sequences; keys and values are kept.

        Args:
            token_ids, positions: [rows], int64.
            guard: of all blocks.

        Returns:
            [rows, hidden_size], before the last norm.

        Raises:
            CacheCorrupt: of what is to be kept, something does not lie in an open block. That was not written.
        """
        rows = token_ids.shape[0]
        x = self._embedding.index_select(0, token_ids).float()
        if self.config.embedding_scale != 1.0:
            x = x.mul_(self.config.embedding_scale)
        turns = self._turns_to(paging.most_keys)
        workspace = self._room(self._library.workspace_bytes(self._model, rows, paging.most_keys))
        refused = torch.zeros(1, dtype=torch.int32)
        step = Step(
            *(address(tensor) for tensor in (x, positions, paging.rows, paging.blocks, paging.offsets, paging.segments, paging.tables)),
            turns,
            cache.address,
            cache.side_numbers,
            *(address(tensor) for tensor in (workspace, guard.words, refused)),
            *(rows, paging.rows.shape[0], paging.segments.shape[0], cache.block_tokens, paging.most_keys, guard.end_block),
        )
        self._library.forward(self._model, step)
        if refused:
            raise CacheCorrupt(
                f"{int(refused)} writes of keys and values went astray after they were judged, and were not done; please report this"
            )
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Of some rows of `forward`'s result: [rows, hidden_size] → [rows, vocab_size]."""
        rows = hidden.shape[0]
        logits = torch.empty(rows, self._head.rows)
        workspace = self._room(apply_bytes(rows, self._head.columns))
        where = (address(logits), address(workspace))
        self._library.apply(address(hidden), rows, self._head, address(self._norm), self.config.norm_eps, *where)
        return logits[:, : self.config.vocab_size]

    def _layer(self, weights: ModelWeights, index: int, turn: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        sandwich = config.sandwich_norms

        def norm(name: str) -> int | None:
            return self._keep(norm_weight(weights, f"{prefix}{name}.weight", config.hidden_size, config))

        attention = prefix + "self_attn."
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv, out, gate_up, down = (self._packed.matrix(name) for name in layer_names(index))
        qkv.bias = self._keep(qkv_bias(weights, attention, (q_rows, kv_rows, kv_rows)))
        out.bias = self._keep(optional(weights, attention + "o_proj.bias", (config.hidden_size,)))
        return Layer(
            norm("input_layernorm"),
            self._keep(qk_norm_weight(weights, attention, config) if config.qk_norm else None),
            norm("post_attention_layernorm") if sandwich else None,
            norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
            norm("post_feedforward_layernorm") if sandwich else None,
            *(qkv, out, gate_up, down),
            config.layers[index].window_tokens,
            turn,
        )

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return address(tensor)

    def _turns_to(self, positions: int) -> ctypes.Array[ctypes.c_void_p]:
        """Cosines and sines of all positions below; computed when the first row gets so far, the double at once."""
        known = self._turns[0].shape[0] if self._turns else 0
        if known < positions:
            at = torch.arange(max(positions, 2 * known, _FIRST_TURNS))
            half = self.config.head_dim // 2
            self._turns = []
            for frequencies in self._frequencies:
                cos, sin = rope_turn(frequencies, at)
                self._turns.append(torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1))
            self._turn_addresses = (ctypes.c_void_p * len(self._turns))(*(address(turn) for turn in self._turns))
        return self._turn_addresses

    def _room(self, size_bytes: int) -> Tensor:
        if self._workspace.shape[0] >= size_bytes:
            return self._workspace
        workspace = torch.empty(size_bytes, dtype=torch.uint8)
        if size_bytes <= _KEPT_WORKSPACE_BYTES:
            self._workspace = workspace
        return workspace
