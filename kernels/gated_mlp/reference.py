"""y = act(g) · u, where act is silu(g) = g / (1 + e^−g) or gelu(g) ≈ g/2 · (1 + tanh(√(2/π) · (g + 0.044715·g³))).

Written with exp and tanh on purpose, not with torch's own silu and gelu: on the CPU those compute the last elements of a
thread's share by another formula than the rest, so that a row's result depends on how many rows there are
(docs/adr/0002-batch-invariance.md). exp and tanh do not.
"""

from __future__ import annotations

import math

from torch import Tensor

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(g) · u.

    Args:
        gate_up: [T, 2·I]: g and u side by side.

    Returns:
        [T, I], new and contiguous.
    """
    gate, up = gate_up.chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(g) · u, in the tanh approximation.

    Args:
        gate_up: [T, 2·I]: g and u side by side.

    Returns:
        [T, I], new and contiguous.
    """
    gate, up = gate_up.chunk(2, -1)
    inner = gate.square().mul_(_GELU_CUBIC).add_(1.0).mul_(gate).mul_(_GELU_SCALE)
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(gate).mul_(up)
