"""When silence is a hang."""

from __future__ import annotations

import itertools

from appliance.config.schema import Config
from appliance.supervisor.hang import Hang, HangLimits, Silence, Watch, answered, begin, judge_progress, judge_silence, missed, patience_s

LIMITS = HangLimits(floor_s=10.0, ceiling_s=60.0)


def run(*observations: tuple[float, int | None, int]) -> Watch:
    """A life that became ready at 0 and was then answered at (time, progress, running)."""
    watch = begin(0.0, 0.0)
    for now_s, progress, running in observations:
        watch = answered(watch, now_s, 0.0, progress, running)
    return watch


def test_no_progress_with_requests_running_is_a_hang() -> None:
    """Counters that stand still for longer than the floor, while something runs."""
    watch = run((1.0, 5, 2), (2.0, 5, 2), (11.0, 5, 2))
    assert judge_progress(watch, 11.0, LIMITS) is None
    found = judge_progress(run((1.0, 5, 2), (11.5, 5, 2)), 11.5, LIMITS)
    assert isinstance(found, Hang)
    assert (found.silence, found.running) == (Silence.PROGRESS, 2)
    assert "2 requests running" in str(found)


def test_idle_is_never_a_hang() -> None:
    """An engine that nobody asks anything makes no progress for hours."""
    assert judge_progress(run((1.0, 5, 0), (9999.0, 5, 0)), 9999.0, LIMITS) is None


def test_a_request_after_a_long_idle_time_starts_its_own_clock() -> None:
    """The silence before the request came does not count against it."""
    assert judge_progress(run((1.0, 5, 0), (500.0, 5, 0), (501.0, 5, 1)), 501.0, LIMITS) is None


def test_a_long_honest_prefill_moves_the_counter() -> None:
    """A prompt of many chunks: each chunk counts, so minutes of prefill are no hang."""
    watch = run(*((float(3 * n), n, 1) for n in range(1, 100)))
    assert judge_progress(watch, 298.0, LIMITS) is None


def test_slow_steps_of_this_engine_explain_a_longer_silence() -> None:
    """Steps of 4 s: eight of them are allowed, but never more than the ceiling."""
    slow = run((4.0, 1, 1), (8.0, 2, 1), (12.0, 3, 1))
    assert judge_progress(answered(slow, 40.0, 0.0, 3, 1), 40.0, LIMITS) is None
    assert judge_progress(answered(slow, 45.0, 0.0, 3, 1), 45.0, LIMITS) is not None
    glacial = run((50.0, 1, 1), (100.0, 2, 1), (150.0, 3, 1))
    assert judge_progress(answered(glacial, 211.0, 0.0, 3, 1), 211.0, LIMITS) is not None


def test_an_old_outlier_fades() -> None:
    """One slow step does not excuse a hang a hundred fast steps later."""
    watch = run((1.0, 1, 1), (7.0, 2, 1), *((7.0 + 0.1 * n, 2 + n, 1) for n in range(1, 101)))
    assert judge_progress(answered(watch, 28.0, 0.0, 102, 1), 28.0, LIMITS) is not None


def test_an_engine_that_does_not_count_is_not_judged_by_its_counter() -> None:
    """A foreign engine's /health without numbers: only reachability speaks."""
    assert judge_progress(run((1.0, None, 0), (900.0, None, 0)), 900.0, LIMITS) is None


def test_silence_without_cpu_is_a_hang_at_the_floor() -> None:
    """SIGSTOP, dead-lock, a closed socket: no answers and no CPU, whether or not anything runs."""
    watch = run((1.0, 5, 0))
    assert judge_silence(watch, 10.0, 0.0, LIMITS, "no answer") is None
    found = judge_silence(watch, 11.5, 0.0, LIMITS, "no answer")
    assert found is not None
    assert found.silence is Silence.HEALTH
    assert "uses no CPU" in str(found)


def test_silence_that_computes_has_until_the_ceiling() -> None:
    """A process that holds its loop while it computes may be honest: it has until the ceiling."""
    watch = run((1.0, 5, 1))
    assert judge_silence(watch, 50.0, 45.0, LIMITS, "no answer") is None
    assert judge_silence(watch, 62.0, 55.0, LIMITS, "no answer") is not None


def test_what_it_did_before_it_fell_silent_is_no_excuse() -> None:
    """Stopped right after an honest second of work: the work was before the first missed probe."""
    watch = answered(begin(0.0, 0.0), 1.0, 1.0, 5, 1)
    watch = missed(watch, 6.0, 3.0)
    assert judge_silence(watch, 11.2, 3.0, LIMITS, "no answer") is not None


def test_the_last_question_is_not_waited_for_too_long() -> None:
    """The answer's absence is judged at the floor, not a whole probe time-out later."""
    watch = answered(begin(0.0, 0.0), 100.0, 0.0, 5, 1)
    assert patience_s(watch, 101.0, LIMITS, 5.0) == 5.0
    assert 3.0 < patience_s(watch, 107.0, LIMITS, 5.0) < 3.2
    assert patience_s(watch, 111.0, LIMITS, 5.0) == 5.0


SHIPPED = Config().supervisor
SHIPPED_LIMITS = HangLimits(SHIPPED.hang_floor_s, SHIPPED.hang_ceiling_s)


def test_as_shipped_a_decode_that_stands_still_is_found_within_15_s() -> None:
    """After its last step; with steps of a quarter of a second, and with slow ones of a second too."""
    for step_s in (0.25, 1.0):
        watch, found_s = begin(0.0, 0.0), 0.0
        for probe in itertools.count(1):
            now_s = probe * SHIPPED.probe_interval_s
            watch = answered(watch, now_s, 0.0, int(min(now_s, 30.0) / step_s), 2)
            if judge_progress(watch, now_s, SHIPPED_LIMITS) is not None:
                found_s = now_s
                break
            assert now_s < 100.0
        assert 30.0 + SHIPPED.hang_floor_s < found_s <= 30.0 + 15.0


def test_as_shipped_a_busy_engine_that_answers_no_probe_and_sleeps_is_found_within_15_s() -> None:
    """Each probe is waited for only so long that its absence is judged in time."""
    watch, now_s = answered(begin(0.0, 0.0), 30.0, 5.0, 100, 2), 30.0
    while True:
        now_s += SHIPPED.probe_interval_s
        now_s += patience_s(watch, now_s, SHIPPED_LIMITS, SHIPPED.probe_timeout_s)
        if judge_silence(watch, now_s, 5.0, SHIPPED_LIMITS, "x") is not None:
            break
        watch = missed(watch, now_s, 5.0)
    assert now_s <= 30.0 + 15.0


def test_as_shipped_an_idle_engine_that_is_dead_is_found_within_30_s() -> None:
    """The quiet time before a canary, its patience, and a probe before and after it."""
    assert SHIPPED.canary_s + SHIPPED.hang_floor_s + 2 * SHIPPED.probe_interval_s <= 30.0
