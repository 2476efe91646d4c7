"""bfloat16 in Triton's interpreter: it keeps such numbers as 16-bit integers, and multiplies matrices of them as if they were (the cast to
float32 is right). Here it multiplies the numbers. On a card nothing of this exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """While it is entered."""
    builder = interpreter.InterpreterBuilder
    as_it_is = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16  # the upper half of a float32
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return as_it_is(self, widened(a), widened(b), *more)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = as_it_is
