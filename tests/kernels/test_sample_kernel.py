"""The next token as a Triton kernel, in its interpreter: what reference.py chooses in float64, row by row, in one launch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from appliance_kernels.on_card import OnCard
from appliance_kernels.sample import triton as kernel
from appliance_kernels.sample.reference import NOT_FINITE, Draw, sample

pytestmark = pytest.mark.usefixtures("guarded")
CARD = OnCard(torch.device("cpu"))


def _logits(*shares: float) -> Tensor:
    return torch.tensor([[math.log(share) if share else -math.inf for share in shares]])


def _near_an_edge(logits: Tensor, draw: Draw) -> bool:
    """Whether a u that float32 does not tell from this one gives another token."""
    around = (min(max(draw.u + step, 0.0), 1 - 2**-53) for step in (-3e-6, 3e-6))
    return len({sample(logits, draw.temperature, draw.top_k, draw.top_p, u, draw.min_p) for u in around}) > 1


def test_it_chooses_what_the_reference_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat and peaked rows of an odd length, in pieces, with every mixture of cuts."""
    monkeypatch.setattr(kernel, "WIDTH", 512)
    draws = [
        Draw(),
        Draw(0.7, u=0.4),
        Draw(1.0, top_k=1, u=0.9),
        Draw(1.3, top_k=40, u=0.6),
        Draw(0.8, top_p=0.9, u=0.9999),
        Draw(1.0, top_k=7, top_p=0.5, u=0.8),
        Draw(1.0, top_k=5000, top_p=0.999, u=0.0),
        Draw(0.9, min_p=0.05, u=0.7),
        Draw(1.0, top_k=20, top_p=0.95, min_p=0.1, u=0.99),
    ]
    spread = torch.tensor([0.1, 3.0] * 5)[:9].unsqueeze(1)
    logits = torch.randn(9, 701, generator=torch.Generator().manual_seed(1)) * spread
    found = CARD.tokens(logits, draws)
    judged = 0
    for row, draw, token in zip(logits, draws, found, strict=True):
        if draw.temperature == 0.0:
            assert token == int(row.argmax())
        elif not _near_an_edge(row, draw):
            judged += 1
            assert token == sample(row, draw.temperature, draw.top_k, draw.top_p, draw.u, draw.min_p), draw
    assert judged >= 7


def test_equal_ones_stand_in_the_order_of_their_ids() -> None:
    """At the cut, at the pick and for the largest: as a stable sort has them."""
    flat = torch.zeros(6, 300)
    us = [0.0, 0.34, 0.67, 0.999]
    draws = [*(Draw(1.0, top_k=3, u=u) for u in us), Draw(), Draw(1.0, top_p=0.01, u=0.99)]
    assert CARD.tokens(flat, draws) == [0, 1, 2, 2, 0, 2]


def test_a_token_without_share_is_never_picked() -> None:
    """Not even when u is as close to 1 as a float can be, which float32 takes for 1, nor when a cut asks for more than there is."""
    logits = _logits(0.0, 1.0, 0.0, 0.0).expand(4, -1)
    draws = [Draw(1.0, u=1 - 2**-53), Draw(1.0, top_k=3, u=1 - 2**-53), Draw(1.0, top_p=0.99, u=0.0), Draw(2.0, top_k=2, top_p=0.5, u=0.5)]
    assert CARD.tokens(logits, draws) == [1, 1, 1, 1]


def test_min_p_keeps_what_is_not_much_less_likely_than_the_likeliest() -> None:
    """As the reference: of 0.09, 0.4, 0.3, 0.21 three stay, in the order of their ids, alone and before another cut."""
    logits = _logits(0.09, 0.4, 0.3, 0.21).expand(7, -1)
    draws = [
        *(Draw(1.0, min_p=0.25, u=u) for u in (0.0, 0.43, 0.45, 0.76, 0.78)),
        Draw(1.0, top_k=4, min_p=0.25, u=0.999),
        Draw(0.5, min_p=0.5, u=0.999),
    ]
    assert CARD.tokens(logits, draws) == [1, 1, 2, 2, 3, 3, 2]


def test_the_last_of_a_cut_is_as_far_as_it_goes() -> None:
    """A u that float32 takes for 1 is not past the cut: the next token behind it was cut off."""
    logits = _logits(0.2, 0.5, 0.3).expand(3, -1)
    last = 1 - 2**-53
    draws = [Draw(1.0, top_k=2, u=last), Draw(1.0, top_p=0.79, u=last), Draw(1.0, top_k=1, u=last)]
    assert CARD.tokens(logits, draws) == [2, 2, 1]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    """Of 0.4, 0.3, 0.2, 0.1: two for 0.69, three for 0.71, one for next to nothing."""
    logits = _logits(0.1, 0.4, 0.3, 0.2).expand(12, -1)
    us = [0.0, 0.5, 0.9, 0.999]
    found = CARD.tokens(logits, [Draw(1.0, top_p=top_p, u=u) for top_p in (0.69, 0.71, 1e-9) for u in us])
    assert found == [1, 1, 2, 2, 1, 2, 3, 3, 1, 1, 1, 1]


def test_a_row_that_is_not_finite_is_said_to_be_so_and_others_are_as_ever() -> None:
    """NaN anywhere, an infinite largest, nothing but −∞; inside wider rows, as a product pads them."""
    wider = torch.zeros(5, 90)
    wider[:, 80:] = float("nan")
    logits = wider[:, :80]
    logits[0, 79] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5] = 9.0
    logits[4, 7] = 9.0
    draws = [Draw(1.0), Draw(), Draw(1.0, top_k=4), Draw(), Draw(0.1, top_p=0.9, u=0.5)]
    assert CARD.tokens(logits, draws) == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 5, 7]
