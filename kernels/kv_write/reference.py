"""cache[block(t), :, offset(t)] = row t, for tokens t that may be written there; the others are reported and write nothing.

slot = block · block_tokens + offset. A writer may write a block that lies in its region, is open (its word is 1: one holder,
not sealed; see kernels/refcount), and was claimed by it. What fails one of the three is a defect somewhere above: it is told
to a `Violations` buffer, and the step goes on for everybody else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance_kernels.refcount.reference import HOLDERS, OPEN, SEALED


class Reason(enum.IntEnum):
    """Why a write was not done, or a read not where it was to be."""

    OUTSIDE = 1
    """The block is not of the writer's region, or no block at all."""
    NOT_OPEN = 2
    """The block is free, shared, or sealed."""
    FOREIGN = 3
    """The block is written by somebody else."""
    UNREADABLE = 4
    """Of a read: the block is free, or written by somebody else."""
    UNTOLD = 5
    """There were more refusals than could be told: nobody knows whose they were."""


ANYBODY = -1
"""The owner of what was UNTOLD."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One refusal."""

    owner: int
    block: int
    offset: int
    reason: Reason


class Violations:
    """Where kernels report.

    Attributes:
        rows: [capacity, 4], int64: owner, block, offset, reason.
        count: [1], int32: how many there were; those past the capacity are only counted, and `take` says so.
    """

    def __init__(self, capacity: int = 4096, device: torch.device | None = None) -> None:
        self.rows = torch.zeros(capacity, 4, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def add(self, owners: Tensor, blocks: Tensor, offsets: Tensor, reasons: Tensor) -> None:
        """Report; [n] each. One writer; triton.py appends with an atomic add."""
        begin, room = int(self.count), self.rows.shape[0]
        new = torch.stack((owners, blocks, offsets, reasons), 1)[: max(0, room - begin)]
        self.rows[begin : begin + new.shape[0]] = new
        self.count += owners.shape[0]

    def take(self) -> list[Violation]:
        """Everything reported since the last call, each once; where there was more than could be told, one of ANYBODY's at the end."""
        count, room = int(self.count), self.rows.shape[0]
        if not count:
            return []
        rows = self.rows[: min(count, room)].tolist()
        self.count.zero_()
        if count > room:
            rows.append([ANYBODY, -1, 0, Reason.UNTOLD])
        return list(dict.fromkeys(Violation(owner, block, offset, Reason(reason)) for owner, block, offset, reason in rows))


@dataclass(frozen=True, slots=True)
class Guard:
    """What is known of the blocks, and the region [first_block, end_block) that a writer may write.

    Attributes:
        words, owners: [blocks], int32 and int64.
    """

    words: Tensor
    owners: Tensor
    first_block: int
    end_block: int

    def judge(self, blocks: Tensor, owners: Tensor) -> Tensor:
        """[n] blocks and their would-be writers → [n] reasons, 0 where it may be written."""
        inside = (blocks >= self.first_block) & (blocks < self.end_block)
        known = blocks.clamp(self.first_block, self.end_block - 1)
        reasons = torch.where(self.owners[known] == owners, 0, int(Reason.FOREIGN))
        reasons = torch.where(self.words[known] == OPEN, reasons, int(Reason.NOT_OPEN))
        return torch.where(inside, reasons, int(Reason.OUTSIDE))

    def readable(self, blocks: Tensor, owners: Tensor) -> Tensor:
        """[n] blocks and their would-be readers → [n] bool: sealed and held, or the reader's own. Of all regions."""
        known = blocks.clamp(0, self.words.shape[0] - 1)
        words = self.words[known]
        return (known == blocks) & (words & HOLDERS != 0) & ((words & SEALED != 0) | (self.owners[known] == owners))


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The permitted writes of one step, shared by all layers.

    Attributes:
        rows: [n], of the tokens that are written; None: all of them.
        blocks, offsets: [n], int64.
    """

    rows: Tensor | None
    blocks: Tensor
    offsets: Tensor


def plan_write(slots: Tensor, owners: Tensor, block_tokens: int, guard: Guard, violations: Violations) -> WritePlan:
    """Check every slot before any layer writes.

    Args:
        slots, owners: [T], int64.
        violations: told of those that may not be written.
    """
    blocks = torch.div(slots, block_tokens, rounding_mode="floor")
    offsets = slots - blocks * block_tokens
    reasons = guard.judge(blocks, owners)
    if not reasons.any():
        return WritePlan(None, blocks, offsets)
    bad, rows = reasons.nonzero().view(-1), (reasons == 0).nonzero().view(-1)
    violations.add(owners[bad], blocks[bad], offsets[bad], reasons[bad])
    return WritePlan(rows, blocks[rows], offsets[rows])


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: WritePlan) -> None:
    """Store one layer's keys and values.

    Args:
        k, v: [T, H, D].
        k_cache, v_cache: [blocks, H, block_tokens, D], of this layer.
    """
    if plan.rows is not None:
        k, v = k[plan.rows], v[plan.rows]
    k_cache[plan.blocks, :, plan.offsets] = k
    v_cache[plan.blocks, :, plan.offsets] = v


def plan_blocks(blocks: Sequence[int], owners: Sequence[int], guard: Guard, violations: Violations) -> Tensor:
    """Check whole blocks that are to be overwritten: the indices of those that may be.

    Returns:
        [n], int64, into `blocks`.
    """
    wanted, writers = (torch.tensor(numbers, dtype=torch.int64).to(guard.words.device) for numbers in (blocks, owners))
    reasons = guard.judge(wanted, writers)
    bad = reasons.nonzero().view(-1)
    if bad.numel():
        violations.add(writers[bad], wanted[bad], torch.zeros_like(bad), reasons[bad])
    return (reasons == 0).nonzero().view(-1)


def checked_tables(
    tables: Sequence[Sequence[int]], owners: Sequence[int], guard: Guard, null_block: int, violations: Violations
) -> Sequence[Sequence[int]]:
    """The same tables, with the null block where a reader has no business: what is computed there is told to be thrown away."""
    flat = torch.tensor([block for table in tables for block in table], dtype=torch.int64)
    readers = torch.repeat_interleave(torch.tensor(owners), torch.tensor([len(table) for table in tables]))
    flat, readers = flat.to(guard.words.device), readers.to(guard.words.device)
    good = guard.readable(flat, readers)
    if good.all():
        return tables
    bad = (~good).nonzero().view(-1)
    violations.add(readers[bad], flat[bad], torch.zeros_like(bad), torch.full_like(bad, int(Reason.UNREADABLE)))
    safe = iter(torch.where(good, flat, null_block).tolist())
    return [[next(safe) for _ in table] for table in tables]
