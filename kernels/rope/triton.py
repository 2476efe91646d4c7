"""y = x · cos(p·f) + swap(x) · sin±(p·f), with the tables of reference.rope_turn; the sum in float32.

One program turns all heads of one token: cosines and sines are read once a token, x once, y is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Token `program_id(0)`.

    x_ptr: [T, HEADS, 2·HALF]; tokens and heads x_token_stride and x_head_stride elements apart, the last dimension contiguous.
    cos_ptr, sin_ptr: [T, 2·HALF], contiguous, float32; the sines signed. out_ptr: [T, HEADS, 2·HALF], contiguous, of x's type.
    HEAD_ROWS: heads at a time; WIDTH: at least HALF; powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    within = column < HALF
    turn = token * 2 * HALF + column
    cos_low = tl.load(cos_ptr + turn, mask=within, other=0.0)[None, :]
    cos_high = tl.load(cos_ptr + turn + HALF, mask=within, other=0.0)[None, :]
    sin_low = tl.load(sin_ptr + turn, mask=within, other=0.0)[None, :]
    sin_high = tl.load(sin_ptr + turn + HALF, mask=within, other=0.0)[None, :]
    for first in tl.static_range(0, HEADS, HEAD_ROWS):
        head = first + tl.arange(0, HEAD_ROWS)
        valid = (head < HEADS)[:, None] & within[None, :]
        source = x_ptr + token * x_token_stride + head[:, None] * x_head_stride + column[None, :]
        low = tl.load(source, mask=valid, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
        target = out_ptr + (token * HEADS + head[:, None]) * 2 * HALF + column[None, :]
        tl.store(target, (low * cos_low + high * sin_low).to(out_ptr.dtype.element_ty), mask=valid)
        tl.store(target + HALF, (high * cos_high + low * sin_high).to(out_ptr.dtype.element_ty), mask=valid)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head by its token's position.

    Args:
        x: [T, H, D]; D even, contiguous.
        cos, sin: [T, 1, D], float32, contiguous, from reference.rope_turn.

    Returns:
        [T, H, D], new and contiguous.
    """
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        width = triton.next_power_of_2(dim // 2)
        rope_kernel[(tokens,)](
            *(x, cos, sin, out, x.stride(0), x.stride(1)),
            HEADS=heads,
            HALF=dim // 2,
            HEAD_ROWS=head_rows(heads, width),
            WIDTH=width,
            num_warps=_WARPS,
        )
    return out


def head_rows(heads: int, width: int) -> int:
    """Heads at a time: 2,048 pairs or fewer, 16 to a thread."""
    return max(1, min(int(triton.next_power_of_2(heads)), 2048 // width))
