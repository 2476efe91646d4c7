"""Reference counts done wrong, so that the explorer is seen to find what it looks for. Never used by anything else."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def retain_by_load_and_store(counts_ptr, block, took_ptr):
    """counts[block] += 1 as two accesses."""
    count = tl.load(counts_ptr + block)
    tl.store(counts_ptr + block, count + 1)
    tl.store(took_ptr, 1)


@triton.jit
def retain_by_add_and_undo(counts_ptr, block, took_ptr):
    """Add one; if nobody held the block, take it back."""
    before = tl.atomic_add(counts_ptr + block, 1)
    if before <= 0:
        tl.atomic_add(counts_ptr + block, -1)
    tl.store(took_ptr, tl.where(before > 0, 1, 0))


@triton.jit
def release_by_add(counts_ptr, block, freed_ptr):
    """Take one away; the last one frees."""
    before = tl.atomic_add(counts_ptr + block, -1)
    tl.store(freed_ptr, tl.where(before == 1, 1, 0))


@triton.jit
def write_by_count(counts_ptr, block, cache_ptr, value):
    """Write a block that somebody holds, whoever that is."""
    if tl.load(counts_ptr + block) > 0:
        tl.store(cache_ptr + block, value)


@triton.jit
def tell_by_load_and_store(count_ptr, rows_ptr, owner):
    """Append to the violations with a count that is read and written back."""
    place = tl.load(count_ptr)
    tl.store(count_ptr, place + 1)
    tl.store(rows_ptr + place, owner)


@triton.jit
def release_by_swap_after_a_load(counts_ptr, block, freed_ptr):
    """A compare-and-swap, begun again until it is taken, from a count that was read by a plain load."""
    count = tl.load(counts_ptr + block)
    pending = count > 0
    while pending:
        found = tl.atomic_cas(counts_ptr + block, count, count - 1)
        pending = (found != count) & (found > 0)
        count = found
    tl.store(freed_ptr + tl.program_id(0), tl.where(count == 1, 1, 0))


@triton.jit
def write_up_to_the_end(cache_ptr, size):
    """An element a program, with a bound that lets the end itself in."""
    offset = tl.program_id(0)
    if offset <= size:
        tl.store(cache_ptr + offset, 1.0)
