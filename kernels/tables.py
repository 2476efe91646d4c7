"""Block tables on a card: what paged_decode/triton.py and paged_prefill/triton.py share.

A table's first entries point into the prompts' region [0, null_block), the others into the answers' (null_block, end_block); both may
point to the null block, of zeros. An entry that points elsewhere is a stray: nothing is read there, zeros stand in as if it were the
null block, and it is told to the violations, so that its reader's result is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.kv_write.reference import Guard, Reason, Violations
from appliance_kernels.refcount import reference as words

_OUTSIDE = tl.constexpr(int(Reason.OUTSIDE))
_UNREADABLE = tl.constexpr(int(Reason.UNREADABLE))
_HOLDERS = tl.constexpr(words.HOLDERS)
_SEALED = tl.constexpr(words.SEALED)
_ENTRIES = 64
_NO_ENTRY = -1


@dataclass(frozen=True, slots=True)
class Tables:
    """Some sequences' blocks in order of position.

    Attributes:
        entries: [B, width], int64, contiguous; −1 past a table's end.
        prompt_entries: [B], int64: how many of them lie in the prompts' region.
        readers: [B], int64: whom a violation names.
        null_block, end_block: see above.
    """

    entries: Tensor
    prompt_entries: Tensor
    readers: Tensor
    null_block: int
    end_block: int


def lay_tables(
    tables: Sequence[Sequence[int]],
    prompt_entries: Sequence[int],
    readers: Sequence[int],
    bounds: tuple[int, int],
    device: torch.device,
) -> Tables:
    """Tables of different lengths side by side, on the card. `bounds`: null_block and end_block."""
    width = max(map(len, tables))
    rows = [[*table, *[_NO_ENTRY] * (width - len(table))] for table in tables]
    entries, prompts, names = (torch.tensor(values, dtype=torch.int64).to(device) for values in (rows, prompt_entries, readers))
    return Tables(entries, prompts, names, *bounds)


@triton.jit
def in_segment(block, entry, prompt_entries, null_block, end_block):
    """Whether what `entry` points to may be read; block: int64."""
    of_prompt = entry < prompt_entries
    first = tl.where(of_prompt, 0, null_block)
    end = tl.where(of_prompt, null_block + 1, end_block)
    return (block >= first) & (block < end)


@triton.jit
def key_lanes(
    table_ptr,
    key,
    wanted,
    head,
    table_width,
    prompt_entries,
    null_block,
    end_block,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Where the keys (and the values) of one KV head lie at positions `key`, in elements, and which of the wanted ones may be read.

    table_ptr: [table_width], int64, of one sequence; the cache is [blocks, HEADS, BLOCK_TOKENS, DIM], contiguous.
    """
    entry = key // BLOCK_TOKENS
    block = tl.load(table_ptr + entry, mask=wanted & (entry < table_width), other=-1)
    there = wanted & in_segment(block, entry, prompt_entries, null_block, end_block)
    lane = ((block * HEADS + head) * BLOCK_TOKENS + key % BLOCK_TOKENS) * DIM
    return lane, there


@triton.jit
def tell_strays(
    table_ptr,
    first_entry,
    past_entry,
    table_width,
    prompt_entries,
    null_block,
    end_block,
    reader,
    told,
    ENTRIES: tl.constexpr,
):
    """Append a row (reader, block, 0, OUTSIDE) for each stray among entries [first_entry, past_entry) of one table.

    table_ptr: [table_width], int64; an entry past table_width is a stray, −1. told: rows_ptr, [capacity, 4], int64; count_ptr, [1],
    int32; capacity.
    """
    rows_ptr, count_ptr, capacity = told
    for start in range(first_entry, past_entry, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        wanted = entry < past_entry
        block = tl.load(table_ptr + entry, mask=wanted & (entry < table_width), other=-1)
        stray = wanted & (in_segment(block, entry, prompt_entries, null_block, end_block) == 0)
        tell(stray, block, block * 0 + _OUTSIDE, reader, rows_ptr, count_ptr, capacity)


@triton.jit
def tell(which, blocks, reasons, reader, rows_ptr, count_ptr, capacity):
    """Append a row (reader, block, 0, reason) for each of `which`: a vector, like blocks and reasons, int64."""
    if tl.sum(which.to(tl.int32), 0) > 0:
        place = tl.atomic_add(count_ptr + blocks * 0, 1, mask=which)
        told = which & (place < capacity)
        row_ptr = rows_ptr + place * 4
        tl.store(row_ptr, blocks * 0 + reader, mask=told)
        tl.store(row_ptr + 1, blocks, mask=told)
        tl.store(row_ptr + 2, blocks * 0, mask=told)
        tl.store(row_ptr + 3, reasons, mask=told)


@triton.jit
def check_tables_kernel(
    entries_ptr,
    lengths_ptr,
    prompt_entries_ptr,
    readers_ptr,
    words_ptr,
    owners_ptr,
    rows_ptr,
    count_ptr,
    table_width,
    null_block,
    end_block,
    capacity,
    ENTRIES: tl.constexpr,
):
    """Entries `program_id(0)` · ENTRIES and on of table `program_id(1)`: the null block for those that its reader may not read.

    entries_ptr: [B, table_width], int64, contiguous; changed. lengths_ptr, prompt_entries_ptr, readers_ptr: [B], int64. words_ptr,
    owners_ptr: [end_block], int32, int64. rows_ptr: [capacity, 4], int64; count_ptr: [1], int32.
    """
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    sequence = tl.program_id(1)
    reader = tl.load(readers_ptr + sequence)
    wanted = entry < tl.load(lengths_ptr + sequence)
    entry_ptr = entries_ptr + sequence.to(tl.int64) * table_width + entry
    block = tl.load(entry_ptr, mask=wanted, other=0)
    inside = wanted & in_segment(block, entry, tl.load(prompt_entries_ptr + sequence), null_block, end_block)
    word = tl.load(words_ptr + block, mask=inside, other=0)
    owner = tl.load(owners_ptr + block, mask=inside, other=0)
    readable = inside & ((word & _HOLDERS) != 0) & (((word & _SEALED) != 0) | (owner == reader))
    refused = wanted & (readable == 0)
    tl.store(entry_ptr, block * 0 + null_block, mask=refused)
    tell(refused, block, tl.where(inside, _UNREADABLE, _OUTSIDE).to(tl.int64), reader, rows_ptr, count_ptr, capacity)


def check_tables(tables: Tables, lengths: Tensor, guard: Guard, violations: Violations) -> None:
    """Put the null block where a reader has no business, and tell of it: outside its segment, free, or written by somebody else.

    Args:
        tables: changed.
        lengths: [B], int64, of the tables.
        guard: of all blocks.
    """
    sequences, width = tables.entries.shape
    check_tables_kernel[(triton.cdiv(width, _ENTRIES), sequences)](
        *(tables.entries, lengths, tables.prompt_entries, tables.readers, guard.words, guard.owners, violations.rows, violations.count),
        *(width, tables.null_block, tables.end_block, violations.rows.shape[0]),
        ENTRIES=_ENTRIES,
        num_warps=1,
    )
