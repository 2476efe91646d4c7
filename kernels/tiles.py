"""Attention by tiles of keys: what paged_decode and paged_prefill share.

S = scale · Q·Kᵀ + mask;  P = softmax(S);  O = Σ_t P_t·V_t over tiles t of `tile` keys, in order.

Why tiles: one product P·V over all L keys is split by the matrix library in a way that depends on L, so that the same query
would get other last bits in a longer batch. Over tiles of a fixed size, aligned to positions, a masked tile adds exactly 0 and
every other tile adds the same number in the same order, whatever the batch (docs/adr/0002-batch-invariance.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_ROWS = 8
"""The matrix library computes rows alike when their number is a multiple of it."""

_TILE_AT_LEAST = 128
_VECTOR = 16
"""Floats of the widest vector register: softmax then never has a rest to treat otherwise."""

MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How keys and values lie in the paged cache, and what reads them.

    Attributes:
        null_block: a block of zeros that nobody writes, for what lies past a table's end.
        group: query heads a KV head; query head i looks at KV head i // group.
    """

    block_tokens: int
    kv_heads: int
    group: int
    null_block: int

    @property
    def tile(self) -> int:
        """Keys of one tile."""
        return tile_tokens(self.block_tokens)

    def first_key(self, position: int, window_tokens: int) -> int:
        """Where the first tile that a query at `position` can see begins."""
        return max(0, position - window_tokens + 1) // self.tile * self.tile if window_tokens else 0

    def end_key(self, position: int) -> int:
        """Where the tile of `position` ends."""
        return (position // self.tile + 1) * self.tile

    def padded(self, table: Sequence[int], first_key: int, end_key: int) -> list[int]:
        """The blocks of keys first_key to end_key, null past the table's end."""
        blocks = list(table[first_key // self.block_tokens : end_key // self.block_tokens])
        return blocks + [self.null_block] * ((end_key - first_key) // self.block_tokens - len(blocks))

    def rows(self, blocks: Tensor) -> Tensor:
        """Of the cache seen as [blocks · H, block_tokens · D], grouped by head: [n, width] blocks → [n · H · width]."""
        return (blocks.unsqueeze(1) * self.kv_heads + torch.arange(self.kv_heads).view(1, -1, 1)).reshape(-1)


class Gathered:
    """Where one layer's keys and values are laid side by side; the memory serves every layer of a step.

    Attributes:
        matrices: n · H, of n sequences.
    """

    def __init__(self, shape: CacheShape, blocks: Tensor, dim: int) -> None:
        """For [n, width] blocks of a cache with heads of `dim`."""
        self.matrices = blocks.shape[0] * shape.kv_heads
        self._rows = shape.rows(blocks)
        self._dim = dim
        self._k = torch.empty(self._rows.shape[0], shape.block_tokens * dim)
        self._v = torch.empty_like(self._k)

    def take(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[n · H, L, D] each, of caches [blocks, H, block_tokens, D]; valid until the next call."""
        both = []
        for cache, memory in ((k_cache, self._k), (v_cache, self._v)):
            torch.index_select(cache.view(-1, memory.shape[1]), 0, self._rows, out=memory)
            both.append(memory.view(self.matrices, -1, self._dim))
        return both[0], both[1]


def tile_tokens(block_tokens: int) -> int:
    """Keys of one tile: whole blocks, whole vectors, at least 128."""
    step = math.lcm(block_tokens, _VECTOR)
    return step * -(-_TILE_AT_LEAST // step)


def padded_queries(rows: int) -> int:
    """The next number of query rows that `attend_tiles` takes."""
    return -(-rows // QUERY_ROWS) * QUERY_ROWS


def window_mask(queries: Tensor, keys: Tensor, window_tokens: int) -> Tensor:
    """0 where a query may look, −inf where not: at itself and before, within its window.

    Args:
        queries: [..., M, 1], positions.
        keys: [..., 1, L], positions.
        window_tokens: 0: no window.

    Returns:
        [..., M, L], float32.
    """
    hidden = keys > queries
    if window_tokens:
        hidden = hidden | (keys <= queries - window_tokens)
    return torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, tile: int) -> Tensor:
    """Attention of some query rows over padded keys.

    Args:
        q: [N, M, D]; M a multiple of QUERY_ROWS.
        k, v: [N, L, D]; L a multiple of `tile`; finite everywhere, also where masked.
        mask: [N or 1, M, L]; every row has a 0.

    Returns:
        [N, M, D], new.
    """
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    shares = torch.softmax(scores, -1)
    out = torch.bmm(shares[:, :, :tile], v[:, :tile])
    for start in range(tile, k.shape[1], tile):
        out.baddbmm_(shares[:, :, start : start + tile], v[:, start : start + tile])
    return out
