"""What the service manager hears of several supervisors."""

from __future__ import annotations

from appliance.supervisor.chorus import Chorus
from appliance.supervisor.notify import NullNotifier


class Manager(NullNotifier):
    """Counts."""

    watchdog_interval_s = 5.0

    def __init__(self) -> None:
        self.fed = self.stops = 0

    def turn_done(self) -> None:
        """WATCHDOG=1."""
        self.fed += 1

    def stopping(self) -> None:
        """STOPPING=1."""
        self.stops += 1


def test_one_that_is_stuck_is_not_covered_by_the_others() -> None:
    """The watchdog is fed when each has completed a turn; whoever has ended is waited for no more."""
    manager = Manager()
    chorus = Chorus(manager, lambda: None)
    first, second = chorus.part(0), chorus.part(1)
    chorus.begins(0)
    chorus.begins(1)
    for _ in range(3):
        first.turn_done()
    assert manager.fed == 0
    second.turn_done()
    assert manager.fed == 1
    second.turn_done()
    assert manager.fed == 1
    first.turn_done()
    assert manager.fed == 2
    chorus.ends(1)
    first.turn_done()
    assert manager.fed == 3


def test_a_sentence_of_one_is_not_that_of_all() -> None:
    """It is told that there is something to sum up; the rest goes through."""
    said: list[str] = []
    manager = Manager()
    part = Chorus(manager, lambda: said.append("news")).part(0)
    part.status("serving on rung 0")
    part.stopping()
    assert said == ["news"]
    assert manager.stops == 1
    assert part.watchdog_interval_s == 5.0
