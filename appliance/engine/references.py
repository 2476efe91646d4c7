"""How often KV blocks are held: blocks by their number of holders. 0 is free, or kept by the prefix cache alone."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.engine.block_pool import PoolGeometry, Region
from appliance_kernels.refcount.reference import HOLDERS

References = tuple[tuple[int, int], ...]
"""(holders, how many blocks have so many), fewest first."""


def references_of(words: Tensor, geometry: PoolGeometry) -> References:
    """Of both regions; the null block between them is nobody's."""
    held = torch.cat([words[slice(*geometry.bounds(region))] for region in Region]) & HOLDERS
    holders, counts = torch.unique(held, return_counts=True)
    return tuple(zip(holders.tolist(), counts.tolist(), strict=True))
