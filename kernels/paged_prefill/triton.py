"""o_t = softmax(c · tanh(scale · q_t·K_{≤t}ᵀ / c))·V_{≤t} for chunks of several sequences' tokens t (c = ∞: no cap), by block table.

A program takes some tokens of one chunk and one KV head: rows are tokens × query heads of that KV head. It goes over its keys, the
cached beginning and the chunk's own (which are in the cache already), a tile at a time, with the running maximum m and sum l:

    m' = max(m, max s)    l' = l·e^(m − m') + Σ e^(s − m')    O' = O·e^(m − m') + e^(S − m')·V

Tiles begin at fixed positions; one that a row does not see adds exactly 0 to it. So a row's bits depend neither on the chunk's size
nor on the other chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.kv_write.reference import Violations
from appliance_kernels.paged_decode.triton import capped, precision
from appliance_kernels.tables import Tables, key_lanes, tell_strays

_TILE_BYTES = 8_192
"""Of one tile of keys: two stages of keys and values are then 32 KiB, beside Q, of the 99 KiB that sm_86 lets a program have."""
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tiles_ptr,
    tables_ptr,
    prompt_entries_ptr,
    readers_ptr,
    rows_ptr,
    count_ptr,
    out_ptr,
    q_stride,
    out_stride,
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
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CAPPED: tl.constexpr,
    TELL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Query tile `program_id(0)` and KV head `program_id(1)`.

    q_ptr: [T, HEADS·GROUP, DIM], tokens q_stride elements apart, the rest contiguous. k_cache_ptr, v_cache_ptr: [blocks, HEADS,
    BLOCK_TOKENS, DIM], contiguous. tiles_ptr: [tiles, 4], int64: sequence, first row of q, tokens (at most ROWS // GROUP), position of
    the first. tables_ptr: [B, table_width]; prompt_entries_ptr, readers_ptr: [B]; all int64. rows_ptr: [capacity, 4], int64; count_ptr:
    [1], int32. out_ptr: [T, HEADS·GROUP·DIM], rows out_stride elements apart. ROWS at least 16 and GROUP; WIDTH at least DIM; powers of
    two.
    """
    tile_ptr, head = tiles_ptr + tl.program_id(0) * 4, tl.program_id(1)
    sequence, first_row = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    tokens, position = tl.load(tile_ptr + 2).to(tl.int32), tl.load(tile_ptr + 3).to(tl.int32)
    last = position + tokens - 1
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    table_ptr = tables_ptr + sequence * table_width
    prompt_entries = tl.load(prompt_entries_ptr + sequence)
    if TELL:  # noqa: SIM102  # known when this is compiled
        if head == 0:
            reader = tl.load(readers_ptr + sequence)
            seen, past = first // BLOCK_TOKENS, last // BLOCK_TOKENS + 1
            told = (rows_ptr, count_ptr, capacity)
            tell_strays(table_ptr, seen, past, table_width, prompt_entries, null_block, end_block, reader, told, ENTRIES)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = row // GROUP
    of_tile = (token < tokens)[:, None] & (column < DIM)[None, :]
    query = position + tl.minimum(token, tokens - 1)
    in_row = (head * GROUP + row % GROUP) * DIM
    q_row = (first_row + token) * q_stride + in_row
    q = tl.load(q_ptr + q_row[:, None] + column[None, :], mask=of_tile, other=0.0)
    best = tl.full((ROWS,), _NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(first // KEYS * KEYS, last + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        wanted = (key >= first) & (key <= last)
        lane, there = key_lanes(table_ptr, key, wanted, head, table_width, prompt_entries, null_block, end_block, HEADS, BLOCK_TOKENS, DIM)
        k_place = lane[None, :] + column[:, None]
        k = tl.load(k_cache_ptr + k_place, mask=there[None, :] & (column < DIM)[:, None], other=0.0)
        scores = capped(tl.dot(q, k, input_precision=PRECISION) * scale, cap, CAPPED)
        visible = (key[None, :] <= query[:, None]) & ((window == 0) | (key[None, :] > query[:, None] - window))
        scores = tl.where(visible, scores, _NEVER)
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key yet: −∞ − (−∞) would be no number.
        level = tl.where(new_best == _NEVER, 0.0, new_best)
        shares = tl.exp(scores - level[:, None])
        fade = tl.exp(best - level)
        v_place = lane[:, None] + column[None, :]
        v = tl.load(v_cache_ptr + v_place, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(shares, 1)
        best = new_best
    target = (first_row + token) * out_stride + in_row
    result = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + target[:, None] + column[None, :], result, mask=of_tile)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step's attention for layers of one window.

    Attributes:
        tiles: [tiles, 4], int64; see the kernel.
        window_tokens: 0: everything before.
    """

    tables: Tables
    tiles: Tensor
    window_tokens: int


def plan_prefill(
    tables: Tables, chunks: Sequence[tuple[int, int, int]], group: int, dim: int, element_bytes: int, window_tokens: int
) -> PrefillPlan:
    """Plan the attention of several chunks.

    Args:
        tables: a row a chunk.
        chunks: (first row of q, position of the first token, tokens) each.
        group, dim, element_bytes: query heads a KV head, their size, and the bytes of a number of q.
    """
    step = query_rows(group, dim, element_bytes) // group
    tiles = [
        (index, row + begin, min(step, count - begin), start + begin)
        for index, (row, start, count) in enumerate(chunks)
        for begin in range(0, count, step)
    ]
    return PrefillPlan(tables, torch.tensor(tiles, dtype=torch.int64).to(tables.entries.device), window_tokens)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PrefillPlan,
    scale: float,
    out: Tensor,
    told: Violations | None,
    soft_cap: float = 0.0,
) -> None:
    """One layer.

    Args:
        q: [T, H · group, D]; the last two dimensions contiguous.
        k_cache, v_cache: [blocks, H, block_tokens, D], contiguous, of this layer.
        out: [T, H · group · D], rows contiguous; those of the chunks are written.
        told: of strays; None: another layer of this step has told of them.
        soft_cap: c; 0: none.
    """
    query_heads, dim = q.shape[1:]
    heads, block_tokens = k_cache.shape[1], k_cache.shape[2]
    tables = plan.tables
    rows, count, capacity = (told.rows, told.count, told.rows.shape[0]) if told else (tables.readers, tables.readers, 0)
    sizes = tile_sizes(heads, query_heads // heads, dim, block_tokens, q.element_size())
    prefill_kernel[(plan.tiles.shape[0], heads)](
        *(q, k_cache, v_cache, plan.tiles, tables.entries, tables.prompt_entries, tables.readers, rows, count, out),
        *(q.stride(0), out.stride(0), tables.entries.shape[1], tables.null_block, tables.end_block, capacity),
        *(plan.window_tokens, scale, soft_cap),
        **sizes,
        CAPPED=soft_cap > 0.0,
        TELL=told is not None,
        num_warps=warps(dim, q.element_size()),
        num_stages=2,
    )


def query_rows(group: int, dim: int, element_bytes: int) -> int:
    """Rows of a program: tokens × query heads. Fewer of float32, whose products take three times the registers."""
    rows = 64 if element_bytes == 2 else 32 if dim <= 128 else 16
    return max(rows, int(triton.next_power_of_2(group)))


def warps(dim: int, element_bytes: int) -> int:
    """So that a thread's parts of Q and O stay in registers: where rows have 512 bytes, they are the most."""
    return 8 if triton.next_power_of_2(dim) * element_bytes == 512 else 4


def tile_sizes(heads: int, group: int, dim: int, block_tokens: int, element_bytes: int) -> dict[str, int | str]:
    """What prefill_kernel is compiled for."""
    width = max(16, triton.next_power_of_2(dim))
    return {
        "HEADS": heads,
        "GROUP": group,
        "ROWS": query_rows(group, dim, element_bytes),
        "DIM": dim,
        "WIDTH": width,
        "BLOCK_TOKENS": block_tokens,
        "KEYS": max(16, min(64, _TILE_BYTES // (width * element_bytes))),
        "ENTRIES": 64,
        "PRECISION": precision(dim, element_bytes),
    }
