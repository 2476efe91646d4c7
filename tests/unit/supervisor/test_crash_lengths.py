"""Which lengths of prompts go with crashes, and which only happen to be there."""

from __future__ import annotations

import random
from typing import Any

from appliance.supervisor.crash_lengths import WINDOW_S, crash_lengths, with_lengths

NOW_S = 1_800_000_000.0
Json = dict[str, Any]


def crash(age_s: float, *prompts: tuple[str, int | None]) -> Json:
    """An incident with these bodies and their lengths in flight."""
    inflight = [{"request_id": f"req-{body}", "fingerprint": body, "prompt_tokens": tokens} for body, tokens in prompts]
    return {"time_s": NOW_S - age_s, "generation": 7, "inflight": inflight}


def traffic(count: int, *without: int) -> list[int]:
    """Prompts as people have them: many lengths, none more often than others."""
    chosen = random.Random(7)
    return [tokens for tokens in (chosen.randint(20, 900) for _ in range(count)) if tokens not in without]


def test_three_crashes_with_one_length_are_no_chance() -> None:
    """Each with another body; the reason has all four numbers."""
    crashes = [crash(age, (f"body-{age}", 127), (f"other-{age}", 300 + age)) for age in (10, 20, 30)]
    (found,) = crash_lengths(crashes, traffic(400, 127), NOW_S)
    assert found.tokens == 127
    assert found.why.startswith("3 of 3 crashes of the last day met a prompt of 127 tokens, 0 of ")


def test_two_crashes_are_too_few_and_so_is_no_traffic() -> None:
    """Nothing to measure them against is no proof."""
    crashes = [crash(age, (f"body-{age}", 127)) for age in (10, 20, 30)]
    assert crash_lengths(crashes[:2], traffic(400), NOW_S) == ()
    assert crash_lengths(crashes, [], NOW_S) == ()
    assert crash_lengths([], traffic(10), NOW_S) == ()


def test_a_length_that_everybody_has_is_not_guilty() -> None:
    """A program that always asks the same: its length is in every crash, and in every second of health."""
    crashes = [crash(age, (f"body-{age}", 127)) for age in range(10, 60, 10)]
    assert crash_lengths(crashes, [127] * 200, NOW_S) == ()


def test_a_busy_engine_has_some_prompt_of_each_length() -> None:
    """Sixteen at a time out of forty lengths: that three crashes share one is what chance does."""
    chosen = random.Random(3)
    crashes = [crash(age, *((f"{age}-{number}", chosen.randint(1, 40)) for number in range(16))) for age in (10, 20, 30)]
    assert crash_lengths(crashes, [chosen.randint(1, 40) for _ in range(500)], NOW_S) == ()


def test_the_same_body_again_says_nothing_of_its_length() -> None:
    """It may be its words: that is for the quarantine."""
    crashes = [crash(age, ("the-one", 127)) for age in (10, 20, 30, 40)]
    assert crash_lengths(crashes, traffic(400, 127), NOW_S) == ()


def test_old_crashes_and_prompts_that_nobody_counted_are_left_out() -> None:
    """A day, so that a length is tried again."""
    old = [crash(WINDOW_S + age, (f"body-{age}", 127)) for age in (10, 20)]
    unknown = [crash(age, (f"new-{age}", None)) for age in (10, 20, 30)]
    assert crash_lengths([*old, *unknown, crash(5, ("x", 127))], traffic(400, 127), NOW_S) == ()


def test_lengths_are_filled_in_where_they_were_missing() -> None:
    """What the incident knows already stands."""
    met = crash(0, ("a", None), ("b", 5), ("c", None))
    filled = with_lengths(met, {(7, "req-a"): 127, (7, "req-b"): 6, (8, "req-c"): 9})
    assert filled is not None
    assert [request["prompt_tokens"] for request in filled] == [127, 5, None]
    assert with_lengths(met, {(8, "req-a"): 127}) is None
