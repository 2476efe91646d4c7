"""The next token: argmax of the logits, or the first token whose cumulative share exceeds u.

Shares are p = softmax(logits / temperature), those below min_p · (the largest) taken out and the rest scaled to 1; ordered from
the largest (equal ones by token id), cut to the `top_k` largest,
then to the fewest whose sum (before the cut by p) reaches `top_p`, and taken as they are against u · (their sum).
u in [0, 1) is the only randomness, so a token is a pure function of its logits, its parameters and u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = -1
"""Said, in place of a token, of a row whose largest number is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a row's token is chosen; see above.

    Attributes:
        temperature: 0: the largest, and nothing else counts.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    u: float = 0.0


def tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """[rows, vocab] → a token each; NOT_FINITE where the largest is NaN or infinite."""
    best = greedy(logits)
    finite = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite().tolist()  # NaN counts as the largest
    chosen: list[int] = best.tolist()
    for row, (draw, good) in enumerate(zip(draws, finite, strict=True)):
        if not good:
            chosen[row] = NOT_FINITE
        elif draw.temperature > 0.0:
            chosen[row] = sample(logits[row], draw.temperature, draw.top_k, draw.top_p, draw.u, draw.min_p)
    return chosen


def greedy(logits: Tensor) -> Tensor:
    """[rows, vocab] → [rows], int64."""
    return logits.argmax(-1)


def adjusted(
    logits: Tensor,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Sequence[tuple[int, float]] = (),
) -> Tensor:
    """l_i ← (l_i / r if l_i > 0 else l_i · r) for i in prompt or answer; − frequency · n_i − presence · [n_i > 0]; + bias_i.

    Args:
        logits: [vocab].
        prompt_ids, answer_ids: [n], int64; n_i counts in the answer.

    Returns:
        [vocab], new.
    """
    logits = logits.clone()
    if repetition != 1.0:
        seen: Tensor = torch.unique(torch.cat((prompt_ids, answer_ids)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        said, counts = torch.unique(answer_ids, return_counts=True)
        logits[said] -= frequency * counts + presence
    for token, value in bias:
        logits[token] += value
    return logits


def log_shares(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """log softmax(logits)_token, and the `count` largest, in order, equal ones by token id.

    Args:
        logits: [vocab], finite.

    Returns:
        The token's, and (token id, its logarithm) of the largest.
    """
    logs = torch.log_softmax(logits.double(), -1)
    if not count:
        return float(logs[token]), []
    largest, token_ids = _largest(logs, count)
    return float(logs[token]), list(zip(token_ids[:count].tolist(), largest[:count].tolist(), strict=True))


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float, min_p: float = 0.0) -> int:
    """One row's token.

    Args:
        logits: [vocab]; −inf where a token may not be chosen, finite elsewhere.
        temperature: above 0.
        top_k: 0: all.
        top_p: in (0, 1]; at least one token always stays.
        u: in [0, 1).
    """
    # Through float64: the cumulative sum over a vocabulary of 262,144 must not depend on rounding.
    shares = torch.softmax(logits.double() / temperature, -1)
    if min_p > 0.0:
        shares = shares.where(shares >= min_p * shares.max(), 0.0)
        shares = shares / shares.sum()
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
