"""One word to the service manager out of several supervisors'."""

from __future__ import annotations

from collections.abc import Callable

from appliance.supervisor.notify import Notifier


class Chorus:
    """Owns what is told on. `on_status` is called whenever one of them has published something.

    The watchdog is fed when each of them that runs has completed a turn: one that is stuck is not covered by the others.
    """

    def __init__(self, outer: Notifier, on_status: Callable[[], None]) -> None:
        self.outer = outer
        self.on_status = on_status
        self._running: set[int] = set()
        self._turned: set[int] = set()

    def part(self, index: int) -> Notifier:
        """For one of them."""
        return _Part(self, index)

    def begins(self, index: int) -> None:
        """It is about to run, and is waited for from here on."""
        self._running.add(index)

    def ends(self, index: int) -> None:
        """It is waited for no more."""
        self._running.discard(index)
        self._turned.discard(index)

    def turned(self, index: int) -> None:
        """It has completed a turn."""
        self._turned.add(index)
        if self._turned >= self._running:
            self._turned.clear()
            self.outer.turn_done()


class _Part:
    """A Notifier."""

    def __init__(self, chorus: Chorus, index: int) -> None:
        self._chorus = chorus
        self._index = index

    @property
    def watchdog_interval_s(self) -> float | None:
        """The one there is."""
        return self._chorus.outer.watchdog_interval_s

    def ready(self) -> None:
        """Their loops begin in the same moment, and saying it again does no harm."""
        self._chorus.outer.ready()

    def status(self, sentence: str) -> None:  # noqa: ARG002 - the sum has another
        """The sum is another."""
        self._chorus.on_status()

    def reloading(self) -> None:
        """A reload is of all of them."""
        self._chorus.outer.reloading()

    def stopping(self) -> None:
        """A stop is of all of them."""
        self._chorus.outer.stopping()

    def extend(self) -> None:
        """The stop takes as long as the longest."""
        self._chorus.outer.extend()

    def turn_done(self) -> None:
        """See Chorus."""
        self._chorus.turned(self._index)
