"""y = x · cos(p·f) + swap(x) · sin±(p·f), where swap exchanges the halves of a head and sin± carries −sin on the first half.

That is Hugging Face's `x · cos + rotate_half(x) · sin` with the sign moved from x into the table, which costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_turn(inverse_frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and signed sines of some tokens; shared by all layers of a step.

    Args:
        inverse_frequencies: [D/2], in radians a token.
        positions: [T], int64.

    Returns:
        cos and sin±, each [T, 1, D], float32.
    """
    angles = torch.outer(positions.float(), inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head by its token's position.

    Args:
        x: [T, H, D]; D even.
        cos, sin: [T, 1, D], from `rope_turn`.

    Returns:
        [T, H, D], new and contiguous.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
