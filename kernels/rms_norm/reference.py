"""y = x / sqrt(mean(x²) + eps) · w, over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of the last dimension.

    Args:
        x: [..., D].
        weight: [D], or any shape that broadcasts against x, such as [heads, D].
        eps: added to the mean of squares.

    Returns:
        [..., D], new.
    """
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * scale).mul_(weight)
