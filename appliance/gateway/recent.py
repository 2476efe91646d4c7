"""The last day in steps of ten seconds: how many tokens a second, how long to the first token, how long between two.

Nothing is counted here: the differences of what metrics.py counts are kept, and of the answers under way how far they are.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from appliance.gateway.inflight import LiveRequest
from appliance.gateway.metrics import Distribution, Metrics

STEP_S = 10
KEPT = 24 * 3600 // STEP_S


@dataclass(frozen=True, slots=True)
class Step:
    """Ten seconds. What nothing was measured of is None, and so is not drawn.

    Attributes:
        time_s: of its end, seconds since the epoch.
        tokens_per_s: of answers; prompts are another matter.
        first_p50_s, first_p95_s: to the first token of streams that began in it.
        between_p50_s, between_p95_s: between two tokens.
        running, waiting: requests, at its end.
    """

    time_s: int
    tokens_per_s: float
    first_p50_s: float | None
    first_p95_s: float | None
    between_p50_s: float | None
    between_p95_s: float | None
    running: int
    waiting: int


class Recent:
    """Owns the steps."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps: deque[Step] = deque(maxlen=KEPT)
        self._tokens = 0
        self._first = list(metrics.first_token.counts)
        self._between = list(metrics.inter_token.counts)

    def add(self, time_s: int, requests: Iterable[LiveRequest], running: int, waiting: int) -> None:
        """The step that ends now."""
        done = sum(count for (direction, _), count in self._metrics.tokens.items() if direction == "out")
        tokens = done + sum(request.tokens for request in requests)
        first, self._first = _grown(self._metrics.first_token, self._first)
        between, self._between = _grown(self._metrics.inter_token, self._between)
        first_bounds, between_bounds = self._metrics.first_token.bounds, self._metrics.inter_token.bounds
        step = Step(
            time_s=time_s,
            # An answer that broke off takes its tokens with it, and the engine's own count may be less than ours was.
            tokens_per_s=round(max(0, tokens - self._tokens) / STEP_S, 2),
            first_p50_s=quantile(first_bounds, first, 0.5),
            first_p95_s=quantile(first_bounds, first, 0.95),
            between_p50_s=quantile(between_bounds, between, 0.5),
            between_p95_s=quantile(between_bounds, between, 0.95),
            running=running,
            waiting=waiting,
        )
        self._tokens = tokens
        self._steps.append(step)

    def since(self, time_s: float) -> Iterator[Step]:
        """The steps that ended after that moment, oldest first."""
        newer = itertools.takewhile(lambda step: step.time_s > time_s, reversed(self._steps))
        return reversed(list(newer))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Of a histogram, between its bounds by proportion; None where it is empty. What is over the last bound is at it."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for upper, lower, count in zip(bounds, (0.0, *bounds), counts, strict=False):
        if count and below + count >= wanted:
            return round(lower + (upper - lower) * (wanted - below) / count, 5)
        below += count
    return bounds[-1]


def _grown(distribution: Distribution, before: Sequence[int]) -> tuple[list[int], list[int]]:
    now = list(distribution.counts)
    return [count - old for count, old in zip(now, before, strict=True)], now
