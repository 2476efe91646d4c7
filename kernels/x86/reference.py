"""The products of int8.h in plain torch, as the definition of what a pass computes in 8 bits.

y = Σ_g s_x[g] · s_w[n, g] · Σ_{k in g} q_x[k] · q_w[n, k] + b_n, groups g of GROUP consecutive k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from appliance_kernels.x86.library import GROUP

_LEAST = 1e-30


def rounded(x: Tensor) -> Tensor:
    """Activations as the product sees them: q · s with s = (largest magnitude of the group) / 127. [..., K] → the same, new."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > _LEAST, 127.0 / largest, 0.0)
    return ((groups * inverse).round() * (largest / 127.0)).reshape(x.shape)


def rounded_weight(weight: Tensor) -> Tensor:
    """Weights as the product sees them: s is the next 16-bit number upwards. [N, K] → the same, new."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    bits = (largest / 127.0).contiguous().view(torch.int32)
    scale = ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)
    inverse = torch.where(largest > _LEAST, 1.0 / scale, 0.0)
    return ((groups * inverse).round() * scale).reshape(weight.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, K] and [N, K] → [rows, N], summed in float64."""
    wide_bias = None if bias is None else bias.double()
    return functional.linear(rounded(x).double(), rounded_weight(weight).double(), wide_bias).float()
