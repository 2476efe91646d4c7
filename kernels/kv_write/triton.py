"""cache[block(t), :, offset(t)] = row t, with the checks of reference.py made by whoever writes, in the launch that writes.

One program a token: it reads the block's word and owner, then either stores the row or appends one row to the violations.
A plain read of the word is enough: if it says open and the writer claimed the block, nobody else can change it
(docs/adr/0003-block-words.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.kv_write.reference import Guard, Reason, Violations
from appliance_kernels.refcount import reference as words

_OPEN = tl.constexpr(words.OPEN)
_OUTSIDE = tl.constexpr(int(Reason.OUTSIDE))
_NOT_OPEN = tl.constexpr(int(Reason.NOT_OPEN))
_FOREIGN = tl.constexpr(int(Reason.FOREIGN))
_WIDTH = 512
_WARPS = 4


@triton.jit
def kv_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    writers_ptr,
    words_ptr,
    owners_ptr,
    rows_ptr,
    count_ptr,
    first_block,
    end_block,
    capacity,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store one token's keys and values, or report it.

    k_ptr, v_ptr: [T, HEADS, DIM], rows k_stride and v_stride elements apart. k_cache_ptr, v_cache_ptr: [blocks, HEADS,
    BLOCK_TOKENS, DIM], contiguous. slots_ptr, writers_ptr: [T], int64. words_ptr, owners_ptr: [blocks], int32, int64.
    rows_ptr: [capacity, 4], int64; count_ptr: [1], int32.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    writer = tl.load(writers_ptr + token)
    block = slot // BLOCK_TOKENS  # rounds towards 0: of a slot below 0 it says nothing
    inside = (slot >= 0) & (block >= first_block) & (block < end_block)
    # Of a slot outside, nothing is looked up: block 0 stands in, and its word is not loaded either.
    block = tl.where(inside, block, 0)
    word = tl.load(words_ptr + block, mask=inside, other=0)
    owner = tl.load(owners_ptr + block, mask=inside, other=0)
    reason = tl.where(owner == writer, 0, _FOREIGN)
    reason = tl.where(word == _OPEN, reason, _NOT_OPEN)
    reason = tl.where(inside, reason, _OUTSIDE)
    offset = slot - block * BLOCK_TOKENS
    if reason == 0:
        for start in tl.static_range(0, HEADS * DIM, WIDTH):
            column = start + tl.arange(0, WIDTH)
            valid = column < HEADS * DIM
            target = ((block * HEADS + column // DIM) * BLOCK_TOKENS + offset) * DIM + column % DIM
            tl.store(k_cache_ptr + target, tl.load(k_ptr + token * k_stride + column, mask=valid), mask=valid)
            tl.store(v_cache_ptr + target, tl.load(v_ptr + token * v_stride + column, mask=valid), mask=valid)
    else:
        place = tl.atomic_add(count_ptr, 1)
        if place < capacity:
            # As the reference tells them: the block and the offset that the slot means, were it inside.
            named = tl.where(slot >= 0, slot // BLOCK_TOKENS, -((-slot + BLOCK_TOKENS - 1) // BLOCK_TOKENS))
            row_ptr = rows_ptr + place * 4
            tl.store(row_ptr, writer)
            tl.store(row_ptr + 1, named)
            tl.store(row_ptr + 2, slot - named * BLOCK_TOKENS)
            tl.store(row_ptr + 3, reason.to(tl.int64))


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, writers: Tensor, guard: Guard, violations: Violations
) -> None:
    """Store one layer's keys and values where they may be written.

    Args:
        k, v: [T, H, D]; the last two dimensions contiguous.
        k_cache, v_cache: [blocks, H, block_tokens, D], contiguous, of this layer.
        slots, writers: [T], int64.
        violations: told of the others; every layer tells again.
    """
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    kv_write_kernel[(tokens,)](
        *(k, v, k_cache, v_cache, slots, writers, guard.words, guard.owners, violations.rows, violations.count),
        *(guard.first_block, guard.end_block, violations.rows.shape[0], k.stride(0), v.stride(0)),
        HEADS=heads,
        DIM=dim,
        BLOCK_TOKENS=k_cache.shape[2],
        WIDTH=min(_WIDTH, triton.next_power_of_2(heads * dim)),
        num_warps=_WARPS,
    )
