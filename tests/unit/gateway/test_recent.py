"""The last day in steps: rates of what was counted, quantiles of what was measured, nothing where nothing was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.gateway.metrics import Metrics
from appliance.gateway.recent import KEPT, Recent, quantile


def under_way(tokens: int) -> Any:
    """An answer that is so far."""
    return SimpleNamespace(tokens=tokens)


def test_tokens_are_counted_while_they_come_and_not_twice_when_they_are_settled() -> None:
    """30 under way, then settled as 32 with 10 of another: 3 a second, then 1.2."""
    metrics = Metrics()
    recent = Recent(metrics)
    recent.add(10, [under_way(30)], 1, 0)
    metrics.tokens["out", "usage"] += 32
    metrics.tokens["in", "usage"] += 1000
    recent.add(20, [under_way(10)], 1, 0)
    assert [step.tokens_per_s for step in recent.since(0)] == [3.0, 1.2]


def test_an_answer_that_broke_off_makes_no_negative_rate() -> None:
    """Its tokens are gone, and the next step begins from there."""
    recent = Recent(Metrics())
    recent.add(10, [under_way(500)], 1, 0)
    recent.add(20, [], 0, 0)
    recent.add(30, [under_way(20)], 1, 0)
    assert [step.tokens_per_s for step in recent.since(0)] == [50.0, 0.0, 2.0]


def test_each_step_has_its_own_quantiles() -> None:
    """What was measured in it, not since the start; None where nothing was."""
    metrics = Metrics()
    recent = Recent(metrics)
    for _ in range(100):
        metrics.first_token.observe(0.2)
    recent.add(10, [], 0, 0)
    recent.add(20, [], 0, 0)
    metrics.inter_token.observe(0.012, 10)
    recent.add(30, [], 0, 0)
    first, second, third = recent.since(0)
    assert first.first_p50_s is not None
    assert 0.1 < first.first_p50_s <= 0.25
    assert first.between_p50_s is None
    assert (second.first_p50_s, second.between_p50_s) == (None, None)
    assert third.between_p95_s is not None
    assert 0.01 < third.between_p95_s <= 0.02


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [((0, 0, 0), 0.5, None), ((10, 0, 0), 0.5, 0.5), ((0, 10, 0), 0.5, 1.5), ((5, 5, 0), 0.95, 1.9), ((0, 0, 7), 0.5, 2.0)],
)
def test_quantiles_lie_between_the_bounds(counts: tuple[int, ...], share: float, value: float | None) -> None:
    """By proportion; what is over the last bound is at it."""
    assert quantile((1.0, 2.0), counts, share) == value


def test_a_day_is_kept_and_the_newer_part_can_be_asked_for() -> None:
    """The oldest go first."""
    recent = Recent(Metrics())
    for number in range(KEPT + 5):
        recent.add(10 * number, [], 0, 0)
    whole = list(recent.since(-1))
    assert (len(whole), whole[0].time_s) == (KEPT, 50)
    assert [step.time_s for step in recent.since(10 * KEPT + 20)] == [10 * KEPT + 30, 10 * KEPT + 40]
