"""word[b] ← next(word[b], operation) for all blocks b at once, from any number of launches; see reference.py for the table.

One program a block number: read the word, compute the next one, swap it in if the word is still the one that was read, else
begin again with the word that was found. The swap is the only write, and it is atomic as the read is, so every change of a word is a step
of the table from the word that really was there (docs/adr/0003-block-words.md has the argument, tests/kernels/test_refcount.py
runs every interleaving of two programs). A program begins again only because another one took a step: none waits for anybody.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.refcount import reference
from appliance_kernels.refcount.reference import Step

_SEALED = tl.constexpr(reference.SEALED)
_KEPT = tl.constexpr(reference.KEPT)
_HOLDERS = tl.constexpr(reference.HOLDERS)
_REFUSED = tl.constexpr(reference.REFUSED)
_NO_BLOCK = tl.constexpr(reference.NO_BLOCK)


@triton.jit
def next_word(word, STEP: tl.constexpr):
    """As reference.next_word; STEP is a reference.Step."""
    holders = word & _HOLDERS
    after = word
    if STEP == 0:  # claim
        after = tl.where(word == 0, 1, word)
    if STEP == 1:  # seal
        after = tl.where(word == 1, _SEALED | 1, word)
    if STEP == 2:  # keep
        after = tl.where(((word & _SEALED) != 0) & (holders > 0), word | _KEPT, word)
    if STEP == 3:  # retain
        after = tl.where(((word & _SEALED) != 0) & (holders < _HOLDERS), word + 1, word)
    if STEP == 4:  # release
        last = (holders == 1) & ((word & _KEPT) == 0)
        after = tl.where(holders == 0, word, tl.where(last, 0, word - 1))
    if STEP == 5:  # evict
        after = tl.where(word == (_SEALED | _KEPT), 0, word)
    return after


@triton.jit
def take_step_kernel(words_ptr, blocks_ptr, results_ptr, block_count, STEP: tl.constexpr):
    """results[i] = the word that blocks[i] has after the step, or REFUSED, or NO_BLOCK.

    words_ptr: [block_count], int32. blocks_ptr: [programs], int64. results_ptr: [programs], int32.
    """
    index = tl.program_id(0)
    block = tl.load(blocks_ptr + index)
    result = tl.full((), _NO_BLOCK, tl.int32)
    if (block >= 0) & (block < block_count):
        word_ptr = words_ptr + block
        seen = tl.atomic_cas(word_ptr, 0, 0)  # only read: a plain load beside another program's swap would be a race
        after = next_word(seen, STEP)
        pending = after != seen
        while pending:
            found = tl.atomic_cas(word_ptr, seen, after)
            lost = found != seen
            seen = found
            after = tl.where(lost, next_word(found, STEP), after)
            pending = lost & (after != seen)
        result = tl.where(after == seen, _REFUSED, after)
    tl.store(results_ptr + index, result)


def take_step(words: Tensor, blocks: Tensor, step: Step, results: Tensor) -> None:
    """Take one step on each block, in no order; a block may come more than once. One launch, nothing is waited for.

    Args:
        words: [blocks], int32, contiguous; changed.
        blocks: [n], int64, contiguous, on the same device.
        results: [n], int32, contiguous; written: the word after the step, REFUSED or NO_BLOCK.
    """
    if blocks.numel():
        take_step_kernel[(blocks.numel(),)](words, blocks, results, words.numel(), STEP=int(step))
