"""The next token: argmax of the logits, or the first token whose cumulative share exceeds u.

Shares are p = softmax(logits / temperature), ordered from the largest (equal ones by token id), cut to the `top_k` largest,
then to the fewest whose sum (before the cut by p) reaches `top_p`, and taken as they are against u · (their sum).
u in [0, 1) is the only randomness, so a token is a pure function of its logits, its parameters and u.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """[rows, vocab] → [rows], int64."""
    return logits.argmax(-1)


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    """One row's token.

    Args:
        logits: [vocab], finite.
        temperature: above 0.
        top_k: 0: all.
        top_p: in (0, 1]; at least one token always stays.
        u: in [0, 1).
    """
    # Through float64: the cumulative sum over a vocabulary of 262,144 must not depend on rounding.
    shares = torch.softmax(logits.double() / temperature, -1)
    if top_k == 0 and top_p >= 1.0:
        return _pick(shares, u)
    shares, token_ids = _largest(shares, top_k) if top_k else _nucleus_and_more(shares, top_p)
    if top_k:
        shares, token_ids = shares[:top_k] / shares[:top_k].sum(), token_ids[:top_k]
    before = shares.cumsum(-1) - shares
    shares = shares[: max(1, int((before < top_p).sum()))]
    return int(token_ids[_pick(shares, u)])


def _largest(shares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """At least the `count` largest, in order, and their token ids: as a full sort would give, without one."""
    if count >= shares.shape[0]:
        return torch.sort(shares, descending=True, stable=True)
    least = torch.topk(shares, count, sorted=False).values.min()
    token_ids = (shares >= least).nonzero().squeeze(1)
    ordered, order = torch.sort(shares[token_ids], descending=True, stable=True)
    return ordered, token_ids[order]


def _nucleus_and_more(shares: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The largest shares, enough of them to reach `top_p`."""
    count = 256
    while True:
        ordered, token_ids = _largest(shares, count)
        if count >= shares.shape[0] or float(ordered.sum()) > top_p:
            return ordered, token_ids
        count *= 8


def _pick(shares: Tensor, u: float) -> int:
    cumulative = shares.cumsum(-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    # Rounding may leave u · sum at the very end; the last token with any share is then meant.
    return min(index, int(shares.nonzero()[-1]))
