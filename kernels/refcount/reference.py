"""word[b] ← next(word[b], operation), for blocks b, one after the other; a step that may not be taken changes nothing.

One int32 word a block says everything about it; there is no list and no second count beside it. Its transitions:

    claim     0            → 1              the block was free; whoever took this step may write it, nobody else
    seal      1            → S + 1          its holder writes no more; from now on it may be shared
    keep      S + n, n ≥ 1 → S + C + n      the prefix cache keeps it beyond its last holder
    retain    S (+ C) + n  → S (+ C) + n + 1    n ≥ 1, or n ≥ 0 with C: a free block cannot be retained, nor one that is written
    release   1            → 0
              S + 1        → 0
              S (+ C) + n  → S (+ C) + n − 1    otherwise, n ≥ 1
    evict     S + C        → 0              the cache lets go, if nobody holds it

S = SEALED, C = KEPT, n = holders. A block is free exactly when its word is 0, and may be written by its one holder exactly
when its word is 1. Sharing and writing are different words, so no step leads to a block that one may write and another reads.

Every permitted step changes the word, so a compare-and-swap that expects the word it was computed from is the whole
operation on any number of writers: triton.py does that, and docs/adr/0003-block-words.md says why a plain add does not do.
Here, on the CPU, there is one writer: the engine's thread. These functions are not atomic.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import Tensor

SEALED = 1 << 30
KEPT = 1 << 29
HOLDERS = KEPT - 1
"""The bits that count."""

OPEN = 1
"""The word of a block that its holder may write."""
FREE = 0

REFUSED = -1
"""What `step` says of a step that may not be taken."""
NO_BLOCK = -2
"""What it says of a number that is no block."""


class Step(enum.IntEnum):
    """The operations of the table above."""

    CLAIM = 0
    SEAL = 1
    KEEP = 2
    RETAIN = 3
    RELEASE = 4
    EVICT = 5


def next_word(word: int, step: Step) -> int:
    """The word after the step; the same word where it may not be taken."""
    holders = word & HOLDERS
    if step is Step.CLAIM:
        return OPEN if word == FREE else word
    if step is Step.SEAL:
        return SEALED | OPEN if word == OPEN else word
    if step is Step.KEEP:
        return word | KEPT if word & SEALED and holders else word
    if step is Step.RETAIN:
        return word + 1 if word & SEALED and holders < HOLDERS else word
    if step is Step.RELEASE:
        return _released(word, holders)
    return FREE if word == SEALED | KEPT else word


def _released(word: int, holders: int) -> int:
    if holders == 0:
        return word
    return FREE if holders == 1 and not word & KEPT else word - 1


def take_step(words: Tensor, blocks: Iterable[int], step: Step) -> list[int]:
    """Take one step on each block, in order; a block may come more than once.

    Args:
        words: [blocks], int32, on the CPU; written.

    Returns:
        A number for each: the word it has now, or REFUSED, or NO_BLOCK; both are negative, and then nothing was written.
    """
    memory = words.numpy()
    count = memory.shape[0]
    results = []
    for block in blocks:
        if not 0 <= block < count:
            results.append(NO_BLOCK)
            continue
        before = int(memory[block])
        after = next_word(before, step)
        memory[block] = after
        results.append(REFUSED if after == before else after)
    return results


def free_blocks(words: Tensor, first_block: int, end_block: int, count: int) -> Tensor:
    """Up to `count` blocks of [first_block, end_block) that are free as of now, lowest numbers first: candidates for a claim.

    Returns:
        [n], int64.
    """
    return (words[first_block:end_block] == FREE).nonzero().view(-1)[:count] + first_block


def count_held(words: Tensor) -> int:
    """Blocks that somebody holds; what only the prefix cache keeps is not among them."""
    return int(torch.count_nonzero(words & HOLDERS))
