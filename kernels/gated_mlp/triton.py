"""y = g / (1 + e^−t) · u, where t = g for silu, and t = 2·√(2/π) · (g + 0.044715·g³) for gelu in its tanh approximation.

Both are reference.py's: g/2 · (1 + tanh z) = g / (1 + e^−2z). In float32, whatever g and u are.
One program a piece of a row: g and u are read once, y is written once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_TWICE_GELU_SCALE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBIC = tl.constexpr(0.044715)
_WIDTH = 1024
_WARPS = 4


@triton.jit
def gated_mlp_kernel(gate_up_ptr, out_ptr, row_stride, INNER: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr):
    """Columns `program_id(1)` · WIDTH and on of row `program_id(0)`.

    gate_up_ptr: [T, 2·INNER], rows row_stride elements apart, g then u. out_ptr: [T, INNER], contiguous, of the same type.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    valid = column < INNER
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(source + INNER, mask=valid, other=0.0).to(tl.float32)
    turn = gate
    if GELU:
        turn = _TWICE_GELU_SCALE * gate * (1.0 + _GELU_CUBIC * gate * gate)
    tl.store(out_ptr + row * INNER + column, (gate / (1.0 + tl.exp(-turn)) * up).to(out_ptr.dtype.element_ty), mask=valid)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(g) · u.

    Args:
        gate_up: [T, 2·I], g and u side by side; rows contiguous.

    Returns:
        [T, I], new and contiguous.
    """
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(g) · u, in the tanh approximation; as `silu_mul`."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        width = min(_WIDTH, triton.next_power_of_2(inner))
        grid = (tokens, triton.cdiv(inner, width))
        gated_mlp_kernel[grid](gate_up, out, gate_up.stride(0), INNER=inner, WIDTH=width, GELU=gelu, num_warps=_WARPS)
    return out
