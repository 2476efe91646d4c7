"""What becomes of a request that lost its engine: verdicts, ways on, quarantine."""

from __future__ import annotations

import math

import pytest

from appliance.core.launch import ContinuesBy
from appliance.core.requests import Resumability
from appliance.gateway.quarantine import KEPT_MAX, SUSPICION_TTL_S, Quarantine
from appliance.gateway.resume import (
    LIVES_MAX,
    TRIAL_S,
    Death,
    LifeName,
    Loss,
    Losses,
    Progress,
    Verdict,
    Way,
    after_loss,
    chance_of_death,
    way_on,
)

REPLAY, CONTINUE, FAIL = Resumability.REPLAY, Resumability.CONTINUE, Resumability.FAIL


def lost(*chances: float, fruitless: int = 1, crashes: int = 0, lives: int = 1) -> Losses:
    """A request that has lost so many; `chances`: of those that died alone with it."""
    return Losses(lives, fruitless, list(map(LifeName, range(crashes))), list(chances))


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (Loss(REPLAY, lost(), 0.0), Verdict.AGAIN),
        (Loss(CONTINUE, lost(crashes=1), 299.0), Verdict.AGAIN),
        (Loss(FAIL, lost(), 0.0), Verdict.FAIL_SENT),
        (Loss(REPLAY, lost(fruitless=3), 0.0), Verdict.FAIL_ATTEMPTS),
        (Loss(REPLAY, lost(lives=LIVES_MAX + 1), 0.0), Verdict.FAIL_ATTEMPTS),
        (Loss(REPLAY, lost(), 301.0), Verdict.FAIL_WAITED),
        (Loss(CONTINUE, lost(fruitless=2, crashes=2), 0.0), Verdict.ALONE),
        (Loss(CONTINUE, lost(0.0, fruitless=3, crashes=3), 0.0), Verdict.QUARANTINE),
        (Loss(FAIL, lost(0.0, fruitless=3, crashes=3), 0.0), Verdict.QUARANTINE),
        (Loss(CONTINUE, lost(0.1, fruitless=3, crashes=3), 0.0), Verdict.ALONE),  # engines die all the time
        (Loss(CONTINUE, lost(0.1, 0.1, 0.1, 0.09, fruitless=6, crashes=6), 0.0), Verdict.QUARANTINE),
        (Loss(CONTINUE, lost(0.1, fruitless=4, crashes=2), 0.0), Verdict.FAIL_ATTEMPTS),
    ],
)
def test_what_becomes_of_a_request_that_lost_its_engine(loss: Loss, verdict: Verdict) -> None:
    """Two losses in a row are forgiven with the default; two crashes make a suspect; one more, alone, is proof."""
    assert after_loss(loss, max_attempts=2, max_wait_s=300.0) is verdict


def test_a_request_that_gets_further_each_time_is_never_suspected() -> None:
    """An engine that is killed every ten seconds is not this request's fault."""
    losses = Losses()
    for generation in range(LIVES_MAX):
        losses.got_further()
        losses.add(LifeName(generation))
        assert after_loss(Loss(CONTINUE, losses, 0.0), max_attempts=2, max_wait_s=300.0) is Verdict.AGAIN
    assert losses.crashes == [LifeName(LIVES_MAX - 1)]


def test_a_poison_is_suspected_at_its_second_crash_wherever_it_kills() -> None:
    """It may get far in its first life; in the second it dies where it died."""
    losses = Losses()
    losses.got_further()
    losses.add(LifeName(1))
    assert not losses.suspected
    losses.add(LifeName(1, replica=1))
    assert losses.suspected


def test_a_connection_that_broke_under_a_living_engine_is_no_crash() -> None:
    """It counts as an attempt and blames nobody."""
    losses = Losses()
    losses.add(LifeName(1))
    losses.survived(LifeName(1))
    losses.add(LifeName(1))
    losses.add(LifeName(1, replica=1))
    losses.survived(LifeName(1))
    assert (losses.fruitless, losses.crashes, losses.suspected) == (3, [LifeName(1, replica=1)], False)


def test_the_chance_that_an_engine_dies_anyway() -> None:
    """By how often it died without this request, in the time that it served."""
    one, two, three, four = lives = [LifeName(1), LifeName(2), LifeName(1, replica=1), LifeName(3)]
    deaths = [Death(life, 10.0) for life in lives]
    assert chance_of_death(deaths, [one, two, three, four], 5.0) == 0.0
    assert chance_of_death(deaths, [three, four], 4.0) == pytest.approx(1 - math.exp(-2 / 40 * 4))
    assert chance_of_death(deaths, [three, four], 0.001) == pytest.approx(1 - math.exp(-2 / 40 * TRIAL_S))
    assert chance_of_death(deaths, [three, four], 1000.0) == pytest.approx(1.0)
    assert chance_of_death([], [three, four], 1000.0) == 0.0


@pytest.mark.parametrize(
    ("progress", "engine", "way"),
    [
        (Progress(sent=False, noted=False, comparable=False, generates=True), ContinuesBy.IDS, Way.IDS),
        (Progress(sent=False, noted=False, comparable=False, generates=False), ContinuesBy.IDS, Way.PLAIN),
        (Progress(sent=False, noted=True, comparable=False, generates=True), ContinuesBy.REPLAY, Way.PLAIN),
        (Progress(sent=True, noted=True, comparable=False, generates=True), ContinuesBy.IDS, Way.IDS),
        (Progress(sent=True, noted=True, comparable=False, generates=True), ContinuesBy.REPLAY, None),
        (Progress(sent=True, noted=False, comparable=True, generates=True), ContinuesBy.REPLAY, Way.REPLAY),
        (Progress(sent=True, noted=False, comparable=True, generates=True), ContinuesBy.IDS, Way.REPLAY),
        (Progress(sent=True, noted=False, comparable=False, generates=True), ContinuesBy.IDS, None),
        (Progress(sent=False, noted=False, comparable=False, generates=True), ContinuesBy.MESSAGE, Way.PLAIN),
        (Progress(sent=True, noted=False, comparable=False, generates=True, plain=True), ContinuesBy.MESSAGE, Way.MESSAGE),
        (Progress(sent=True, noted=False, comparable=True, generates=True, plain=True), ContinuesBy.MESSAGE, Way.MESSAGE),
        (Progress(sent=True, noted=False, comparable=True, generates=True), ContinuesBy.MESSAGE, Way.REPLAY),
        (Progress(sent=True, noted=False, comparable=False, generates=True, plain=True), ContinuesBy.REPLAY, None),
    ],
)
def test_the_way_on_follows_from_what_was_sent_and_what_the_engine_can(progress: Progress, engine: ContinuesBy, way: Way | None) -> None:
    """The backend may have changed in between."""
    assert way_on(progress, engine) is way


class Clock:
    """A clock that is moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_sentence_ends_after_its_time() -> None:
    """500 for the client that had it, 422 with the rest of the time for all others, then nothing."""
    clock = Clock()
    quarantine = Quarantine(600.0, clock)
    assert not quarantine
    told = quarantine.convict("abc", 3, "inc-3")
    assert (told.status, told.code, told.incident_id) == (500, "request_quarantined", "inc-3")
    clock.now_s = 100.0
    refused = quarantine.refusal("abc")
    assert refused is not None
    assert (refused.status, refused.code, refused.incident_id) == (422, "request_quarantined", "inc-3")
    assert "another 500 s" in refused.message
    assert quarantine.refusal("abd") is None
    assert len(quarantine) == 1
    clock.now_s = 600.0
    assert quarantine.refusal("abc") is None
    assert not quarantine


def test_quarantine_can_be_switched_off() -> None:
    """With a time of 0 the client is told, and nobody is refused."""
    quarantine = Quarantine(0.0, Clock())
    assert quarantine.convict("abc", 3, None).status == 500
    assert quarantine.refusal("abc") is None


def test_suspicion_outlives_the_client() -> None:
    """Whoever comes back with the same body brings its crashes along, until it is answered or an hour is over."""
    clock = Clock()
    quarantine = Quarantine(600.0, clock)
    quarantine.remember("abc", [LifeName(1), LifeName(2)])
    quarantine.remember("xyz", [LifeName(2)])
    assert quarantine.suspicion("abc") == (LifeName(1), LifeName(2))
    quarantine.clear("abc")
    assert quarantine.suspicion("abc") == ()
    clock.now_s = SUSPICION_TTL_S
    assert quarantine.suspicion("xyz") == ()


def test_what_is_remembered_of_a_body_grows() -> None:
    """Two clients have sent it and left at different times: neither wipes out what the other one's engines died of."""
    quarantine = Quarantine(600.0, Clock())
    quarantine.remember("abc", [LifeName(1), LifeName(2)])
    quarantine.remember("abc", [LifeName(2)])
    quarantine.remember("abc", [LifeName(4)])
    assert quarantine.suspicion("abc") == (LifeName(1), LifeName(2), LifeName(4))


def test_the_tables_are_bounded() -> None:
    """The oldest go first."""
    quarantine = Quarantine(600.0, Clock())
    for number in range(KEPT_MAX + 5):
        quarantine.convict(f"body {number}", 3, None)
    assert len(quarantine) == KEPT_MAX
    assert quarantine.refusal("body 4") is None
    assert quarantine.refusal("body 5") is not None
