"""o_b = softmax(c · tanh(scale · q_b·K_bᵀ / c))·V_b for one new token of each sequence b (c = ∞: no cap), K and V by block table.

The keys are cut into splits of SPLIT positions, and each is a program of its own: over its keys j,

    m = max s_j    l = Σ e^(s_j − m)    o = Σ e^(s_j − m)·v_j / l

and a second launch puts the splits together: O = Σ_i e^(L_i − M)·o_i / Σ_i e^(L_i − M), where L_i = m_i + ln l_i, M = max L_i. So one
long sequence fills a card. All query heads of a KV head are rows of one product, so keys and values are read once.

Splits and tiles begin at fixed positions and are added in order: a row's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.kv_write.reference import Violations
from appliance_kernels.tables import Tables, key_lanes, tell_strays

SPLIT = 256
"""Keys of a split: so few that one sequence of 8,192 is 32 programs a KV head, so many that its result is small beside its keys."""
_TILE_BYTES = 16_384
"""Of one tile of keys: two stages of keys and values are then 64 KiB of the 99 KiB that sm_86 lets a program have."""
WARPS = 4
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def capped(scores, cap, CAPPED: tl.constexpr):
    """c · tanh(s / c), or s."""
    if CAPPED:
        scores = cap - 2.0 * cap / (tl.exp(2.0 * scores / cap) + 1.0)
    return scores


@triton.jit
def split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    prompt_entries_ptr,
    readers_ptr,
    positions_ptr,
    rows_ptr,
    count_ptr,
    partial_ptr,
    weight_ptr,
    q_stride,
    table_width,
    null_block,
    end_block,
    capacity,
    window,
    scale,
    cap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CAPPED: tl.constexpr,
    TELL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Split `program_id(0)` of KV head `program_id(1)` of sequence `program_id(2)`.

    q_ptr: [B, HEADS·GROUP, DIM], tokens q_stride elements apart, the rest contiguous. k_cache_ptr, v_cache_ptr: [blocks, HEADS,
    BLOCK_TOKENS, DIM], contiguous. tables_ptr: [B, table_width]; prompt_entries_ptr, readers_ptr, positions_ptr: [B]; all int64.
    rows_ptr: [capacity, 4], int64; count_ptr: [1], int32. partial_ptr: [splits, B, HEADS·GROUP, DIM], float32, and weight_ptr:
    [splits, B, HEADS·GROUP], float32: o and L; not written where a sequence has no such split. ROWS: at least GROUP and 16; WIDTH: at
    least DIM; powers of two. KEYS divides SPLIT.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + sequence).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    begin = (first // SPLIT + split) * SPLIT
    if begin <= position:
        end = tl.minimum(begin + SPLIT, position + 1)
        begin = tl.maximum(begin, first // KEYS * KEYS)
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_width
        prompt_entries = tl.load(prompt_entries_ptr + sequence)
        if TELL:  # noqa: SIM102  # known when this is compiled
            if head == 0:
                reader = tl.load(readers_ptr + sequence)
                seen = tl.maximum(begin, first) // BLOCK_TOKENS
                past = (end - 1) // BLOCK_TOKENS + 1
                told = (rows_ptr, count_ptr, capacity)
                tell_strays(table_ptr, seen, past, table_width, prompt_entries, null_block, end_block, reader, told, ENTRIES)
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        of_head = (row < GROUP)[:, None] & (column < DIM)[None, :]
        q_row = sequence.to(tl.int64) * q_stride + (head * GROUP + row) * DIM
        q = tl.load(q_ptr + q_row[:, None] + column[None, :], mask=of_head, other=0.0)
        best = tl.full((ROWS,), _NEVER, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            visible = (key >= first) & (key <= position)
            lane, there = key_lanes(
                table_ptr, key, visible, head, table_width, prompt_entries, null_block, end_block, HEADS, BLOCK_TOKENS, DIM
            )
            k_place = lane[None, :] + column[:, None]
            k = tl.load(k_cache_ptr + k_place, mask=there[None, :] & (column < DIM)[:, None], other=0.0)
            scores = capped(tl.dot(q, k, input_precision=PRECISION) * scale, cap, CAPPED)
            scores = tl.where(visible[None, :], scores, _NEVER)
            new_best = tl.maximum(best, tl.max(scores, 1))
            shares = tl.exp(scores - new_best[:, None])
            fade = tl.exp(best - new_best)
            v_place = lane[:, None] + column[None, :]
            v = tl.load(v_cache_ptr + v_place, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
            mixed = tl.dot(shares.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)
            total = total * fade + tl.sum(shares, 1)
            best = new_best
        place = ((split * tl.num_programs(2) + sequence) * HEADS + head).to(tl.int64) * GROUP + row
        tl.store(partial_ptr + place[:, None] * DIM + column[None, :], mixed / total[:, None], mask=of_head)
        tl.store(weight_ptr + place, best + tl.log(total), mask=row < GROUP)


@triton.jit
def combine_kernel(
    partial_ptr,
    weight_ptr,
    positions_ptr,
    out_ptr,
    out_stride,
    window,
    QUERY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Query head `program_id(0)` of sequence `program_id(1)`: its splits put together.

    partial_ptr, weight_ptr, positions_ptr: as of split_kernel. out_ptr: [B, QUERY_HEADS·DIM], rows out_stride elements apart.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + sequence).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    column = tl.arange(0, WIDTH)
    best = tl.full((), _NEVER, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((WIDTH,), tl.float32)
    for split in range(position // SPLIT - first // SPLIT + 1):
        place = (split * tl.num_programs(1) + sequence).to(tl.int64) * QUERY_HEADS + head
        weight = tl.load(weight_ptr + place)
        part = tl.load(partial_ptr + place * DIM + column, mask=column < DIM, other=0.0)
        new_best = tl.maximum(best, weight)
        fade, share = tl.exp(best - new_best), tl.exp(weight - new_best)
        mixed = mixed * fade + part * share
        total = total * fade + share
        best = new_best
    target = out_ptr + sequence.to(tl.int64) * out_stride + head * DIM + column
    tl.store(target, (mixed / total).to(out_ptr.dtype.element_ty), mask=column < DIM)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step's attention for layers of one window.

    Attributes:
        positions: [B], int64, of the new tokens.
        splits: of the longest sequence.
        window_tokens: 0: everything before.
    """

    tables: Tables
    positions: Tensor
    splits: int
    window_tokens: int


def plan_decode(tables: Tables, positions: Sequence[int], window_tokens: int) -> DecodePlan:
    """Plan the attention of one new token a sequence, at these positions."""
    firsts = [max(0, position - window_tokens + 1) if window_tokens else 0 for position in positions]
    splits = max(position // SPLIT - first // SPLIT + 1 for position, first in zip(positions, firsts, strict=True))
    return DecodePlan(tables, torch.tensor(positions, dtype=torch.int64).to(tables.entries.device), splits, window_tokens)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, scale: float, out: Tensor, told: Violations | None, soft_cap: float = 0.0
) -> None:
    """One layer.

    Args:
        q: [B, H · group, D]; the last two dimensions contiguous.
        k_cache, v_cache: [blocks, H, block_tokens, D], contiguous, of this layer; the new tokens already written.
        out: [B, H · group · D], rows contiguous; written.
        told: of strays; None: another layer of this step has told of them.
        soft_cap: c; 0: none.
    """
    sequences, query_heads, dim = q.shape
    heads, block_tokens = k_cache.shape[1], k_cache.shape[2]
    tables, width = plan.tables, triton.next_power_of_2(dim)
    partial = torch.empty(plan.splits, sequences, query_heads, dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(plan.splits, sequences, query_heads, dtype=torch.float32, device=q.device)
    rows, count, capacity = (told.rows, told.count, told.rows.shape[0]) if told else (tables.readers, plan.positions, 0)
    split_kernel[(plan.splits, heads, sequences)](
        *(q, k_cache, v_cache, tables.entries, tables.prompt_entries, tables.readers, plan.positions, rows, count, partial, weight),
        *(q.stride(0), tables.entries.shape[1], tables.null_block, tables.end_block, capacity, plan.window_tokens, scale, soft_cap),
        **split_sizes(heads, query_heads // heads, dim, block_tokens, q.element_size()),
        CAPPED=soft_cap > 0.0,
        TELL=told is not None,
        num_warps=WARPS,
        num_stages=2,
    )
    combine_kernel[(query_heads, sequences)](
        *(partial, weight, plan.positions, out, out.stride(0), plan.window_tokens),
        QUERY_HEADS=query_heads,
        DIM=dim,
        WIDTH=width,
        SPLIT=SPLIT,
        num_warps=1,
    )


def precision(dim: int, element_bytes: int) -> str:
    """Of float32 products; 16 bits have one only. Three products of 19 bits on tensor cores keep 22 bits of 24; for the largest heads
    their operands take more registers than there are, and the products are made without."""
    return "tf32x3" if dim <= 128 or element_bytes == 2 else "ieee"


def split_sizes(heads: int, group: int, dim: int, block_tokens: int, element_bytes: int) -> dict[str, int | str]:
    """What split_kernel is compiled for."""
    width = triton.next_power_of_2(dim)
    return {
        "HEADS": heads,
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(group)),
        "DIM": dim,
        "WIDTH": max(16, width),
        "BLOCK_TOKENS": block_tokens,
        "SPLIT": SPLIT,
        "KEYS": max(16, min(64, _TILE_BYTES // (width * element_bytes))),
        "ENTRIES": 64,
        "PRECISION": precision(dim, element_bytes),
    }
