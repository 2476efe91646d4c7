"""rms_norm, rope and the gates against their formulas in float64; and that a row does not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from appliance_kernels.gated_mlp.reference import gelu_tanh_mul, silu_mul
from appliance_kernels.rms_norm.reference import rms_norm
from appliance_kernels.rope.reference import rope, rope_turn


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (5, 3, 96)])
def test_rms_norm_is_its_formula(shape: tuple[int, ...]) -> None:
    """x / sqrt(mean(x²) + eps) · w, to float32's precision, on odd shapes."""
    x, w = _normal(*shape), _normal(shape[-1], seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    assert torch.allclose(rms_norm(x, w, 1e-5).double(), exact, rtol=1e-5, atol=1e-6)


def test_rms_norm_takes_a_weight_row_a_head() -> None:
    """Queries and keys are normalised in one call with different weights."""
    x, w = _normal(4, 3, 16), _normal(3, 16, seed=1)
    together = rms_norm(x, w, 1e-6)
    for head in range(3):
        assert torch.equal(together[:, head], rms_norm(x[:, head], w[head], 1e-6))


def test_rope_turns_pairs_of_halves() -> None:
    """Element i and i + D/2 of a head are the coordinates that the angle p·f_i turns."""
    x = _normal(5, 2, 8)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    positions = torch.tensor([0, 1, 7, 1000, 131071])
    angle = positions.double().unsqueeze(1) * frequencies.double()
    a, b = x.double()[..., :4], x.double()[..., 4:]
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    exact = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    # Large angles are float32 products: at position 131071 their rounding is 2⁻⁷ of a radian's last bits.
    assert torch.allclose(rope(x, *rope_turn(frequencies, positions)).double(), exact, atol=2e-2)
    near = positions < 1000
    assert torch.allclose(rope(x, *rope_turn(frequencies, positions))[near].double(), exact[near], atol=1e-5)


def test_rope_keeps_scores_of_equal_distance() -> None:
    """q·k depends on the distance of their positions only: what attention relies on."""
    frequencies = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
    q, k = _normal(1, 1, 64), _normal(1, 1, 64, seed=1)

    def score(at: int, distance: int) -> float:
        turned_q = rope(q, *rope_turn(frequencies, torch.tensor([at + distance])))
        turned_k = rope(k, *rope_turn(frequencies, torch.tensor([at])))
        return float((turned_q * turned_k).sum())

    assert score(0, 5) == pytest.approx(score(300, 5), abs=1e-3)
    assert score(0, 5) != pytest.approx(score(0, 6), abs=1e-3)


@pytest.mark.parametrize(
    ("gate", "oracle"),
    [(silu_mul, functional.silu), (gelu_tanh_mul, lambda x: functional.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu_tanh"],
)
def test_gates_are_their_formulas(gate: Callable[[Tensor], Tensor], oracle: Callable[[Tensor], Tensor]) -> None:
    """act(g) · u against torch's own in float64, also where exp overflows."""
    gate_up = torch.cat((_normal(3, 40) * 4, _normal(3, 40, seed=1)), -1)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    exact = oracle(gate_up[:, :40].double()) * gate_up[:, 40:].double()
    assert torch.allclose(gate(gate_up).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [192, 1536, 2050])
def test_a_row_does_not_depend_on_the_number_of_rows(threads: int, width: int) -> None:
    """To the last bit, wherever a thread's share ends: torch's own silu and gelu fail this (docs/adr/0002)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = _normal(160, 2 * width)
        w = _normal(2 * width, seed=1)
        for operation in (silu_mul, gelu_tanh_mul, lambda rows: rms_norm(rows, w, 1e-6)):
            whole = operation(x)
            for begin, end in ((0, 1), (3, 5), (7, 48), (11, 66), (0, 113), (50, 160)):
                assert torch.equal(operation(x[begin:end].clone()), whole[begin:end])
    finally:
        torch.set_num_threads(before)
