"""o_t = softmax(scale · q_t·K_{≤t}ᵀ)·V_{≤t} for a chunk of one sequence's tokens t, K and V by block table.

The chunk's own keys and values are in the cache already. What depends on the step but not on the layer is planned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance_kernels.tiles import CacheShape, Gathered, attend_tiles, padded_queries, window_mask

_QUERY_TOKENS = 64
"""Tokens whose scores are computed together: bounds the score matrix, and lets early tokens skip late keys."""


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Tokens `begin` to `end` of the chunk, and the keys they may see: `first` to `stop` of the gathered ones."""

    begin: int
    end: int
    first: int
    stop: int
    mask: Tensor
    """[1, M, L]."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One chunk's attention for layers of one window."""

    keys: Gathered
    query_tiles: tuple[_QueryTile, ...]
    tile: int


def plan_prefill(shape: CacheShape, dim: int, table: Sequence[int], start: int, count: int, window_tokens: int) -> PrefillPlan:
    """Plan the attention of the tokens at positions `start` to `start + count`.

    Args:
        dim: of a head.
        table: the sequence's blocks in order of position; at least up to the last token.
        window_tokens: 0: everything before.
    """
    base = shape.first_key(start, window_tokens)
    blocks = torch.tensor([shape.padded(table, base, shape.end_key(start + count - 1))])
    query_tiles = []
    for begin in range(0, count, _QUERY_TOKENS):
        end = min(begin + _QUERY_TOKENS, count)
        last = start + end - 1
        first, stop = shape.first_key(start + begin, window_tokens), shape.end_key(last)
        # Rows that only fill up the multiple repeat the last token: they too must see a key, or softmax divides 0 by 0.
        rows = torch.arange(padded_queries((end - begin) * shape.group))
        positions = rows.div_(shape.group, rounding_mode="floor").add_(start + begin).clamp_(max=last)
        mask = window_mask(positions.unsqueeze(1), torch.arange(first, stop), window_tokens)
        query_tiles.append(_QueryTile(begin, end, first - base, stop - base, mask.unsqueeze(0)))
    return PrefillPlan(Gathered(shape, blocks, dim), tuple(query_tiles), shape.tile)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PrefillPlan, scale: float, out: Tensor) -> None:
    """One layer.

    Args:
        q: [T, H · group, D].
        k_cache, v_cache: [blocks, H, block_tokens, D], contiguous, of this layer.
        out: [T, H · group · D], contiguous; written.
    """
    kv_heads, dim = k_cache.shape[1], q.shape[-1]
    group = q.shape[1] // kv_heads
    k, v = plan.keys.take(k_cache, v_cache)
    q_by_head = q.reshape(-1, kv_heads, group, dim).transpose(0, 1)
    out_by_head = out.view(-1, kv_heads, group, dim).transpose(0, 1)
    for part in plan.query_tiles:
        tokens = part.end - part.begin
        queries = q.new_zeros(kv_heads, part.mask.shape[1], dim)
        queries[:, : tokens * group].view(kv_heads, tokens, group, dim).copy_(q_by_head[:, part.begin : part.end])
        keys = slice(part.first, part.stop)
        mixed = attend_tiles(queries, k[:, keys], v[:, keys], part.mask, scale, plan.tile)
        out_by_head[:, part.begin : part.end] = mixed[:, : tokens * group].view(kv_heads, tokens, group, dim)
