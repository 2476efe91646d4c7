"""The next token: orders, cuts and the distribution itself."""

from __future__ import annotations

import math

import pytest
import torch

from appliance_kernels.sample.reference import adjusted, greedy, log_shares, sample


def _logits(*shares: float) -> torch.Tensor:
    return torch.tensor([math.log(share) if share else -math.inf for share in shares])


def test_greedy_takes_the_first_of_the_largest() -> None:
    """Ties go to the lower token id, in every row."""
    assert greedy(torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])).tolist() == [1, 0]


def test_u_picks_by_cumulative_share() -> None:
    """Without cuts, tokens lie in order of their ids."""
    logits = _logits(0.2, 0.5, 0.3)
    picked = [sample(logits, 1.0, 0, 1.0, u) for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)]
    assert picked == [0, 0, 1, 1, 2, 2]


def test_a_token_without_share_is_never_picked() -> None:
    """Not even when u is as close to 1 as a float can be."""
    logits = _logits(0.0, 1.0, 0.0)
    assert {sample(logits, 1.0, 0, 1.0, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_top_k_keeps_the_largest_and_shares_out_again() -> None:
    """Of 0.1, 0.4, 0.3, 0.2 the two largest become 4/7 and 3/7, in that order."""
    logits = _logits(0.1, 0.4, 0.3, 0.2)
    assert [sample(logits, 1.0, 2, 1.0, u) for u in (0.0, 0.57, 0.58, 0.99)] == [1, 1, 2, 2]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    """0.4 + 0.3 reach 0.7 and no more are kept; a tiny top_p keeps one."""
    logits = _logits(0.1, 0.4, 0.3, 0.2)
    assert {sample(logits, 1.0, 0, 0.69, u / 50) for u in range(50)} == {1, 2}
    assert {sample(logits, 1.0, 0, 0.71, u / 50) for u in range(50)} == {1, 2, 3}
    assert {sample(logits, 1.0, 0, 1e-9, u / 50) for u in range(50)} == {1}


def test_ties_at_the_cut_go_to_lower_ids() -> None:
    """A partial sort must choose what a full stable sort would."""
    logits = torch.zeros(1000)
    assert {sample(logits, 1.0, 3, 1.0, u / 50) for u in range(50)} == {0, 1, 2}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.999), (7, 1.0), (300, 0.5), (5000, 0.95)])
def test_partial_sorts_choose_what_a_full_sort_chooses(top_k: int, top_p: float) -> None:
    """On a vocabulary of 5,000, flat and peaked."""
    generator = torch.Generator().manual_seed(1)
    for spread in (0.1, 1.0, 8.0):
        logits = torch.randn(5000, generator=generator) * spread
        shares, order = torch.sort(torch.softmax(logits.double() / 0.7, -1), descending=True, stable=True)
        if top_k:
            shares = shares[:top_k] / shares[:top_k].sum()
        kept = shares[(shares.cumsum(-1) - shares) < top_p]
        for u in (0.0, 0.1, 0.5, 0.9, 0.9999):
            cumulative = kept.cumsum(-1)
            expected = int(order[int((cumulative <= u * cumulative[-1]).sum())])
            assert sample(logits, 0.7, top_k, top_p, u) == expected


def test_temperature_sharpens() -> None:
    """Shares to the power of 1/T: at 0.5 the odds of 2:1 become 4:1."""
    logits = _logits(2 / 3, 1 / 3)
    picked = [sample(logits, 0.5, 0, 1.0, (i + 0.5) / 1000) for i in range(1000)]
    assert picked.count(0) == 800


def test_min_p_keeps_what_is_not_much_less_likely_than_the_likeliest() -> None:
    """A quarter of 0.4 is 0.1: of 0.09, 0.4, 0.3, 0.21 three stay, in the order of their ids, and share out again."""
    logits = _logits(0.09, 0.4, 0.3, 0.21)
    assert {sample(logits, 1.0, 0, 1.0, u / 50, min_p=0.25) for u in range(50)} == {1, 2, 3}
    assert [sample(logits, 1.0, 0, 1.0, u, min_p=0.25) for u in (0.0, 0.43, 0.45, 0.76, 0.78)] == [1, 1, 2, 2, 3]
    assert {sample(logits, 1.0, 0, 1.0, u / 50, min_p=1.0) for u in range(50)} == {1}


def test_penalties_by_their_formulas() -> None:
    """Repetition over prompt and answer, the others over the answer alone, a bias on top; the argument is left as it was."""
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 4.0])
    changed = adjusted(logits, torch.tensor([0, 1, 1]), torch.tensor([2, 2, 1]), 2.0, 0.25, 0.5, ((4, -1.0), (4, -1.0)))
    assert changed.tolist() == [1.0, -4.0 - 0.75, 0.5 - 1.25, 0.5, 2.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5, 4.0]
    assert torch.equal(adjusted(logits, torch.tensor([0]), torch.tensor([], dtype=torch.int64), 1.0, 1.0, 1.0), logits)


def test_log_shares_are_in_order_and_ties_go_to_lower_ids() -> None:
    """As sampling orders them."""
    logprob, top = log_shares(_logits(0.25, 0.25, 0.5), 1, 3)
    assert logprob == pytest.approx(math.log(0.25))
    assert [token for token, _ in top] == [2, 0, 1]
    assert log_shares(_logits(0.5, 0.5), 0, 0)[1] == []
    assert len(log_shares(_logits(0.5, 0.5), 0, 20)[1]) == 2
