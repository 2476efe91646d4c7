"""y = x·Wᵀ + b in float32, by the library whose rows do not depend on each other.

oneDNN reads the weights as they lie in the file, without packing them first, and is 1.3 to 3 times as fast as MKL on the
machines measured. Both compute a row of y by the same sums whatever the other rows are and however many there are, as long
as their number is a multiple of ROW_MULTIPLE: docs/adr/0002-batch-invariance.md has the evidence, tests/engine checks it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

HAS_ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")

ROW_MULTIPLE: int = 2 if HAS_ONEDNN else 8
"""One row alone goes another way (a matrix-vector product) in both libraries; in MKL, fewer than 12 in part, too."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product with one weight matrix.

    Args:
        x: [rows, K], contiguous; rows a multiple of ROW_MULTIPLE.
        weight: [N, K], contiguous.
        bias: [N].

    Returns:
        [rows, N], new.
    """
    if HAS_ONEDNN and not x.is_cuda:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def padded_rows(rows: int) -> int:
    """The next number of rows that `linear` takes."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
