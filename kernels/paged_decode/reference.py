"""o_b = softmax(scale · q_b·K_bᵀ)·V_b for one new token of each sequence b, K and V by block table.

What depends on the step but not on the layer is planned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance_kernels.tiles import CacheShape, Gathered, attend_tiles, padded_queries, window_mask

_RAGGED = 2
"""Sequences whose lengths differ by more than this factor are computed apart, so that a short one does not pay for a long one."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences `begin` to `end` of the batch: about equally long."""

    begin: int
    end: int
    keys: Gathered
    queries: Tensor
    """[n · H, M, D]: memory; the rows past the group stay zero."""
    mask: Tensor
    """[n · H, M, L]."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step's attention for layers of one window."""

    groups: tuple[_Group, ...]
    tile: int


def plan_decode(shape: CacheShape, dim: int, tables: Sequence[Sequence[int]], positions: Sequence[int], window_tokens: int) -> DecodePlan:
    """Plan the attention of one new token a sequence.

    Args:
        dim: of a head.
        tables: a sequence's blocks in order of position; at least up to its new token.
        positions: of the new tokens. Ordered batches make few groups.
        window_tokens: 0: everything before.
    """
    firsts = [shape.first_key(position, window_tokens) for position in positions]
    lengths = [shape.end_key(position) - first for position, first in zip(positions, firsts, strict=True)]
    groups = []
    for begin, end in _ragged_groups(lengths):
        members = range(begin, end)
        length = max(lengths[begin:end])
        blocks = torch.tensor([shape.padded(tables[i], firsts[i], firsts[i] + length) for i in members])
        keys = torch.tensor(firsts[begin:end]).view(-1, 1, 1) + torch.arange(length)
        mask = window_mask(torch.tensor(positions[begin:end]).view(-1, 1, 1), keys, window_tokens)
        rows = padded_queries(shape.group)
        by_head = mask.unsqueeze(1).expand(-1, shape.kv_heads, rows, -1).reshape(-1, rows, length)
        queries = torch.zeros(by_head.shape[0], rows, dim)
        groups.append(_Group(begin, end, Gathered(shape, blocks, dim), queries, by_head))
    return DecodePlan(tuple(groups), shape.tile)


def _ragged_groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours whose lengths are within a factor of each other."""
    bounds = [0]
    for index in range(1, len(lengths)):
        members = lengths[bounds[-1] : index + 1]
        if max(members) > _RAGGED * min(members):
            bounds.append(index)
    return list(zip(bounds, [*bounds[1:], len(lengths)], strict=True))


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, scale: float, out: Tensor) -> None:
    """One layer.

    Args:
        q: [B, H · group, D].
        k_cache, v_cache: [blocks, H, block_tokens, D], contiguous, of this layer; the new tokens already written.
        out: [B, H · group · D], contiguous; written.
    """
    dim = q.shape[-1]
    group = q.shape[1] // k_cache.shape[1]
    for part in plan.groups:
        part.queries[:, :group] = q[part.begin : part.end].reshape(-1, group, dim)
        mixed = attend_tiles(part.queries, *part.keys.take(k_cache, v_cache), part.mask, scale, plan.tile)
        out[part.begin : part.end].view(-1, group, dim).copy_(mixed[:, :group])
