"""What the gateway counts. Plain integers on the way; exposition.py turns them into Prometheus' text when somebody asks."""

from __future__ import annotations

import bisect
from collections import Counter, deque

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
HEALTHY_LENGTHS = 500
_TOKENS = tuple(float(2**power) for power in range(4, 18))


class Distribution:
    """A histogram with fixed bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One more, or several of the same."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metrics:
    """What the gateway has counted since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """(endpoint, status) → requests; 499 is a client that left."""
        self.lost: Counter[str] = Counter()
        """Kind of loss → exchanges that lost their engine."""
        self.resent: Counter[str] = Counter()
        """replayed or continued → requests that were given to an engine again."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """(in or out, how it is known) → tokens."""
        self.of_key: Counter[tuple[str, str]] = Counter()
        """(key, requests, tokens_in or tokens_out) → how many."""
        self.refusals: Counter[str] = Counter()
        """Code of the error → requests that were refused before the engine had them."""
        self.learned_lengths = 0
        """Lengths of prompts that have been found to kill engines."""
        self.altered: Counter[str] = Counter()
        """padded or truncated → prompts that were altered so that their length goes."""
        self.fuse_trips: Counter[str] = Counter()
        """Code of the error → prompts that were refused for their length."""
        self.healthy_lengths: deque[int] = deque(maxlen=HEALTHY_LENGTHS)
        """Tokens of the last prompts that were answered, where the engine has said how many they were."""
        self.count_time = Distribution(_FIRST_TOKEN_S)
        self.first_token = Distribution(_FIRST_TOKEN_S)
        self.inter_token = Distribution(_INTER_TOKEN_S)
        self.duration = Distribution(_DURATION_S)
        self.queue_wait = Distribution(_DURATION_S)
        self.prompt_length = Distribution(_TOKENS)
        self.answer_length = Distribution(_TOKENS)
