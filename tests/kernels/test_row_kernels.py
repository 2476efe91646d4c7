"""rms_norm, rope and the gates as Triton kernels, in its interpreter: against their formulas in float64, on odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from appliance_kernels.gated_mlp import reference as gated_mlp
from appliance_kernels.gated_mlp import triton as gated_mlp_kernel
from appliance_kernels.rms_norm import triton as rms_norm_kernel
from appliance_kernels.rope import reference as rope
from appliance_kernels.rope import triton as rope_kernel

pytestmark = pytest.mark.usefixtures("guarded")

TYPES = [
    pytest.param(torch.float32, 2e-6, id="fp32"),
    pytest.param(torch.float16, 2e-3, id="fp16"),
    pytest.param(torch.bfloat16, 2e-2, id="bf16"),
]


def _normal(*shape: int, seed: int = 0, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(kind)


def _check(found: Tensor, exact: Tensor, error: float) -> None:
    """To `error` of the largest number; the worst element is told."""
    off = (found.double() - exact).abs() / exact.abs().max()
    assert off.isfinite().all(), f"{int((~off.isfinite()).sum())} elements were not written"
    assert float(off.max()) <= error, f"element {int(off.argmax())} is off by {float(off.max()):.2e} of the largest"


@pytest.mark.parametrize(("kind", "error"), TYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (3, 576)])
def test_rms_norm_is_its_formula(shape: tuple[int, int], kind: torch.dtype, error: float) -> None:
    """Rows of any length, also those that are no power of two."""
    x, w = _normal(*shape, kind=kind), _normal(shape[-1], seed=1, kind=kind)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    _check(rms_norm_kernel.rms_norm(x, w, 1e-5), exact, error)


def test_rms_norm_of_16_bits_by_a_weight_of_32() -> None:
    """As a card has them: of Gemma's 1 + w, 16 bits would lose half of w. To a unit in the last place, which the interpreter cuts off."""
    x, w = _normal(3, 96, kind=torch.float16), 1.0 + _normal(96, seed=1) / 512
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    found = rms_norm_kernel.rms_norm(x, w, 1e-5)
    assert found.dtype is torch.float16
    _check(found, exact, 1e-3)


def test_rms_norm_of_heads_inside_wider_rows() -> None:
    """As queries and keys lie beside values: neither tokens nor heads are contiguous to each other's ends, each head has its weight."""
    rows, w = _normal(4, 7, 24), _normal(5, 24, seed=1)
    x = rows[:, 1:6]
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    found = rms_norm_kernel.rms_norm(x, w, 1e-6)
    _check(found, exact, 2e-6)
    assert found.is_contiguous()


def test_rms_norm_refuses_a_row_that_a_program_cannot_keep() -> None:
    """Naming both numbers."""
    torch.empty(1)
    with pytest.raises(ValueError, match="16385 columns exceed the 16384"):
        rms_norm_kernel.rms_norm(torch.zeros(1, 16385), torch.zeros(16385), 1e-6)


@pytest.mark.parametrize(("kind", "error"), TYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 80), (5, 64)])
def test_rope_is_its_formula(heads: int, dim: int, kind: torch.dtype, error: float) -> None:
    """On heads inside wider rows, with halves that are no power of two."""
    x = _normal(4, heads + 2, dim, kind=kind)[:, :heads]
    positions = torch.tensor([0, 1, 77, 900])
    cos, sin = rope.rope_turn(10_000.0 ** (-torch.arange(0, dim, 2) / dim), positions)
    exact = x.double() * cos.double() + x.double().roll(dim // 2, -1) * sin.double()
    found = rope_kernel.rope(x, cos, sin)
    _check(found, exact, error)
    assert found.is_contiguous()


@pytest.mark.parametrize(("kind", "error"), TYPES)
@pytest.mark.parametrize(
    ("kernel", "formula"),
    [(gated_mlp_kernel.silu_mul, gated_mlp.silu_mul), (gated_mlp_kernel.gelu_tanh_mul, gated_mlp.gelu_tanh_mul)],
    ids=["silu", "gelu_tanh"],
)
@pytest.mark.parametrize("inner", [41, 1500])
def test_gates_are_their_formulas(
    kernel: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor], inner: int, kind: torch.dtype, error: float
) -> None:
    """Also where e^x overflows, and over more than one piece of a row."""
    gate_up = torch.cat((_normal(3, inner) * 4, _normal(3, inner, seed=1)), -1).to(kind)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    found, exact = kernel(gate_up), formula(gate_up.double())
    _check(found, exact, error)
    if kind is torch.float32:  # each by its own size, too: the cubic's share of a small one is small
        assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_no_rows_are_no_launch() -> None:
    """An empty grid is an error in Triton."""
    assert rms_norm_kernel.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert rope_kernel.rope(torch.zeros(0, 2, 8), torch.zeros(0, 1, 8), torch.zeros(0, 1, 8)).shape == (0, 2, 8)
    assert gated_mlp_kernel.silu_mul(torch.zeros(0, 8)).shape == (0, 4)
