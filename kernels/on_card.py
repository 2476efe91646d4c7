"""The engine's operations on a card: every one is its `triton`, launched on the current stream, in order.

What depends on a step but not on a layer is planned once; a plan is a function that is called layer by layer.

Where a number comes back to the host (`take_step`, `tokens`, `Violations.take`), everything launched before has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance_kernels.gated_mlp import triton as gated_mlp
from appliance_kernels.kv_write.reference import Guard, Violations
from appliance_kernels.kv_write.triton import kv_write
from appliance_kernels.paged_decode.triton import paged_decode, plan_decode
from appliance_kernels.paged_prefill.triton import paged_prefill, plan_prefill
from appliance_kernels.refcount import triton as refcount
from appliance_kernels.refcount.reference import Step
from appliance_kernels.rms_norm import triton as rms_norm
from appliance_kernels.rope import triton as rope
from appliance_kernels.sample.reference import Draw
from appliance_kernels.sample.triton import tokens
from appliance_kernels.tables import Tables, check_tables, lay_tables
from appliance_kernels.tiles import CacheShape

_VIOLATIONS = 16_384
"""Every layer tells of every row that it may not write: room for a whole chunk's, in all layers."""


Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor], None]
"""(q [T, heads, D], k_cache, v_cache, scale, out [T, heads · D]) of one layer."""

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(k [T, kv_heads, D], v, k_cache, v_cache) of one layer."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A sequence that attention reads for.

    Attributes:
        owner: whom a violation names.
        table: its blocks in order of position.
        prompt_blocks: how many of them lie in the prompts' region: the first ones.
    """

    owner: int
    table: Sequence[int]
    prompt_blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a prefill that are one sequence's: `count` tokens from position `start` on, from row `row` on."""

    reader: Reader
    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Cache:
    """What a reader needs to know of the paged cache.

    Attributes:
        dim, dtype: of a head, and of its numbers.
        guard: of all blocks.
        violations: told of what a reader may not read; the null block's zeros stand in for it.
    """

    shape: CacheShape
    dim: int
    dtype: torch.dtype
    guard: Guard
    violations: Violations


class OnCard:
    """Launches them. Also for tensors on the CPU, in Triton's interpreter; implements rows.RowKernels.

    Attributes:
        device: where all tensors lie.
    """

    rms_norm = staticmethod(rms_norm.rms_norm)
    rope = staticmethod(rope.rope)
    silu_mul = staticmethod(gated_mlp.silu_mul)
    gelu_tanh_mul = staticmethod(gated_mlp.gelu_tanh_mul)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take_step(self, words: Tensor, blocks: Sequence[int], step: Step) -> list[int]:
        """All at once, by compare-and-swap, behind everything that was launched before. As refcount.reference."""
        where = self._place(blocks)
        results = torch.empty(where.shape[0], dtype=torch.int32, device=self.device)
        refcount.take_step(words, where, step, results)
        words_after: list[int] = results.tolist()
        return words_after

    def violations(self) -> Violations:
        """A buffer that its kernels can tell."""
        return Violations(_VIOLATIONS, self.device)

    def plan_write(self, slots: Sequence[int], owners: Sequence[int], guard: Guard, cache: Cache) -> Write:
        """Rows to their slots, where `guard` (of a region) lets them be written: judged in each layer's launch, row by row."""
        places, writers = self._place(slots), self._place(owners)

        def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
            kv_write(k, v, k_cache, v_cache, places, writers, guard, cache.violations)

        return write

    def plan_decode(
        self, readers: Sequence[Reader], positions: Sequence[int], windows: Sequence[int], cache: Cache
    ) -> Mapping[int, Attend]:
        """One new token of each reader, by window (0: everything before)."""
        tables = self._checked(readers, cache)
        return {window: self._decode(tables, positions, window, cache) for window in windows}

    def _decode(self, tables: Tables, positions: Sequence[int], window: int, cache: Cache) -> Attend:
        plan = plan_decode(tables, positions, window)
        told: list[Violations] = [cache.violations]  # by the first layer: all have the same tables

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
            paged_decode(q, k_cache, v_cache, plan, scale, out, told.pop() if told else None)

        return attend

    def plan_prefill(self, pieces: Sequence[Piece], windows: Sequence[int], cache: Cache) -> Mapping[int, Attend]:
        """Several sequences' chunks, by window: all in one launch a layer."""
        tables = self._checked([piece.reader for piece in pieces], cache)
        return {window: self._prefill(tables, pieces, window, cache) for window in windows}

    def _prefill(self, tables: Tables, pieces: Sequence[Piece], window: int, cache: Cache) -> Attend:
        chunks = [(piece.row, piece.start, piece.count) for piece in pieces]
        plan = plan_prefill(tables, chunks, cache.shape.group, cache.dim, cache.dtype.itemsize, window)
        told: list[Violations] = [cache.violations]

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
            paged_prefill(q, k_cache, v_cache, plan, scale, out, told.pop() if told else None)

        return attend

    def tokens(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """[rows, vocab] → a token each, all rows in one launch; NOT_FINITE where the largest is NaN or infinite."""
        return tokens(logits, draws)

    def _checked(self, readers: Sequence[Reader], cache: Cache) -> Tables:
        bounds = cache.shape.null_block, cache.guard.words.shape[0]
        names, prompts = [reader.owner for reader in readers], [reader.prompt_blocks for reader in readers]
        tables = lay_tables([reader.table for reader in readers], prompts, names, bounds, self.device)
        check_tables(tables, self._place([len(reader.table) for reader in readers]), cache.guard, cache.violations)
        return tables

    def _place(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)
