"""The reducer: a card that is lost, and what is left."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.states import EngineState as State
from appliance.supervisor import events as ev
from tests.unit.supervisor.machine_cases import TWO_CARDS, Drive, make_diagnosis, make_state


def lost_one(drive: Drive, cards_left: int | None, *, stuck: bool = False) -> Drive:
    """Xid 79 while it serves; its processes go, or stay in the kernel."""
    g = drive.state.generation
    drive.give(ev.GpuLost("Xid 79"), ev.GroupStuck(g, "pid 9 in D") if stuck else ev.GroupEmpty(g))
    return drive.give(ev.Diagnosed(g, make_diagnosis(Cause.GPU_OFF_BUS), f"inc-{g}", 0.5, cards_left))


def on_two_cards() -> Drive:
    """Serving on both."""
    return Drive(make_state(ladder=TWO_CARDS)).give(ev.Started(), ev.GpuReady(2)).started()


def test_a_lost_card_leaves_the_other_one_serving() -> None:
    """One of two falls off the bus: the rung for one card, DEGRADED; with both back (a reboot) the rung that was left is taken again."""
    drive = lost_one(on_two_cards(), 1)
    assert drive.state.state is State.WAITING_FOR_GPU
    drive.give(ev.GpuReady(1)).started()
    assert (drive.state.state, drive.state.history.rung, drive.state.history.wants) == (State.DEGRADED, 4, 0)
    rebooted = Drive(make_state(ladder=TWO_CARDS, history=drive.state.history, generation=2)).give(ev.Started(), ev.GpuReady(2)).started()
    assert (rebooted.state.state, rebooted.state.history.rung, rebooted.state.history.wants) == (State.SERVING, 0, None)


def test_the_other_card_does_not_wait_for_a_corpse() -> None:
    """Processes that SIGKILL does not reach hang on the dead card: they are left to themselves and the next life begins."""
    drive = lost_one(on_two_cards(), 1, stuck=True)
    assert drive.of(ev.Abandon) == [ev.Abandon(1)]
    drive.give(ev.GpuReady(1))
    assert drive.state.state is State.PLANNING
    assert not drive.state.alive


def test_a_corpse_without_another_card_parks() -> None:
    """Nothing to go on with: parked, and the stuck group stays known."""
    drive = lost_one(on_two_cards(), 0, stuck=True)
    assert drive.state.state is State.PARKED
    assert drive.state.alive


@pytest.mark.parametrize(("cards_left", "words"), [(0, "parked because"), (None, "nothing says which card it is")])
def test_a_lost_card_without_another_parks(cards_left: int | None, words: str) -> None:
    """The only one, or one of which nobody knows which it is: an engine on it would hang."""
    drive = lost_one(on_two_cards(), cards_left)
    assert drive.state.state is State.PARKED
    assert words in drive.state.sentence
    assert len(drive.of(ev.Reboot)) == 1


def test_after_a_restart_in_the_same_boot_the_lost_cards_are_still_lost() -> None:
    """applianced comes back to a box without a usable card: parked at once, and `resume` cannot help before a reboot."""
    drive = Drive(make_state(ladder=TWO_CARDS)).give(ev.Started(), ev.CardsGone("0000:01:00 was lost in this boot: reboot"))
    assert drive.state.state is State.PARKED
    assert "reboot" in drive.state.sentence
    drive.give(ev.ResumeRequested("a person")).give(ev.CardsGone("0000:01:00 was lost in this boot: reboot"))
    assert drive.state.state is State.PARKED


def test_fewer_cards_than_any_rung_needs_park() -> None:
    """One of two cards answers and every rung wants two: the sentence has both numbers."""
    drive = Drive(make_state(ladder=TWO_CARDS[:4])).give(ev.Started(), ev.GpuReady(1))
    assert drive.state.state is State.PARKED
    assert "no rung fits the 1 cards" in drive.state.sentence


def test_a_person_chooses_a_rung_for_good() -> None:
    """`restart --rung` on fewer cards: what the lost rung wanted is forgotten."""
    drive = lost_one(on_two_cards(), 1).give(ev.GpuReady(1)).started().give(ev.RestartRequested("x", 4))
    assert drive.state.history.wants is None
