"""y = x / sqrt(mean(x²) + eps) · w, over the last dimension; sums and the root in float32, whatever x is.

One program a row: it is read once, kept in registers, and written once. A row's result does not depend on how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 16_384
"""Of a row that one program can keep."""


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_row_stride,
    x_head_stride,
    weight_head_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Row `program_id(0)`, head `program_id(1)`.

    x_ptr: [rows, HEADS, DIM]; rows and heads x_row_stride and x_head_stride elements apart, DIM contiguous. weight_ptr: [HEADS or 1,
    DIM], heads weight_head_stride apart (0: one for all). out_ptr: [rows, HEADS, DIM], contiguous, of x's type. WIDTH: a power of two,
    at least DIM.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    valid = column < DIM
    x = tl.load(x_ptr + row * x_row_stride + head * x_head_stride + column, mask=valid, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_head_stride + column, mask=valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
    tl.store(out_ptr + (row * HEADS + head) * DIM + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=valid)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of the last dimension.

    Args:
        x: [rows, D] or [rows, heads, D]; the last dimension contiguous.
        weight: [D] or [heads, D], contiguous.
        eps: added to the mean of squares.

    Returns:
        x's shape, new and contiguous.

    Raises:
        ValueError: a row is longer than a program can keep.
    """
    dim = x.shape[-1]
    if dim > MOST_COLUMNS:
        raise ValueError(f"rms_norm: rows of {dim} columns exceed the {MOST_COLUMNS} that a program keeps; raise MOST_COLUMNS")
    heads = x.shape[1] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        width = triton.next_power_of_2(dim)
        rms_norm_kernel[(x.shape[0], heads)](
            *(x, weight, out, x.stride(0), x.stride(1) if x.ndim == 3 else 0, dim if weight.ndim == 2 else 0, eps),
            HEADS=heads,
            DIM=dim,
            WIDTH=width,
            num_warps=warps(width),
        )
    return out


def warps(width: int) -> int:
    """For a row of so many columns: eight to a thread, at most 16 warps."""
    return max(1, min(16, width // 256))
