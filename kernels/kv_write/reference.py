"""cache[block(t), :, offset(t)] = row t, for tokens t whose slots lie in the region that the caller may write.

slot = block · block_tokens + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class StraySlot(Exception):
    """A slot outside the writer's region: a defect of the scheduler. Nothing was written."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Checked slots of one step, shared by all layers: [T] each, int64."""

    blocks: Tensor
    offsets: Tensor


def plan_write(slots: Tensor, block_tokens: int, first_block: int, end_block: int) -> WritePlan:
    """Check every slot against the region [first_block, end_block) before any layer writes.

    Args:
        slots: [T], int64.

    Raises:
        StraySlot: with the slot and the region.
    """
    blocks = torch.div(slots, block_tokens, rounding_mode="floor")
    stray = slots[(blocks < first_block) | (blocks >= end_block)]
    if stray.numel():
        raise StraySlot(
            f"slot {int(stray[0])} ({stray.numel()} of {slots.numel()}) lies outside blocks {first_block} to {end_block - 1}"
            f" of {block_tokens} tokens"
        )
    return WritePlan(blocks, slots - blocks * block_tokens)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: WritePlan) -> None:
    """Store one layer's keys and values.

    Args:
        k, v: [T, H, D].
        k_cache, v_cache: [blocks, H, block_tokens, D], of this layer.
    """
    k_cache[plan.blocks, :, plan.offsets] = k
    v_cache[plan.blocks, :, plan.offsets] = v
