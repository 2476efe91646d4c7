"""What the decoder computes row by row, on one device: the references on the CPU, Triton's kernels on a card (on_card.py)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from appliance_kernels.gated_mlp import reference as gated_mlp
from appliance_kernels.rms_norm import reference as rms_norm
from appliance_kernels.rope import reference as rope


class RowKernels(Protocol):
    """Each as the reference of its name."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See rms_norm/."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See rope/."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See gated_mlp/."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """See gated_mlp/."""


class RowReferences:
    """On the CPU."""

    rms_norm = staticmethod(rms_norm.rms_norm)
    rope = staticmethod(rope.rope)
    silu_mul = staticmethod(gated_mlp.silu_mul)
    gelu_tanh_mul = staticmethod(gated_mlp.gelu_tanh_mul)
