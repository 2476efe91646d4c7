"""Which lengths are learned to be deadly, and for how long."""

from __future__ import annotations

from appliance.gateway.lethal_lengths import LENGTHS_MAX, LethalLengths


class Clock:
    """Moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_it_takes_two_different_bodies() -> None:
    """The same one twice is one; another length is another matter."""
    lengths = LethalLengths(100.0, Clock())
    assert not lengths.convicted(255, "a")
    assert not lengths.convicted(255, "a")
    assert not lengths.convicted(127, "b")
    assert lengths.current() == frozenset()
    assert lengths.convicted(255, "c")
    assert not lengths.convicted(255, "d")
    assert lengths.current() == {255}


def test_it_is_forgotten_and_comes_back_with_the_next_one() -> None:
    """After its time it is tried again; one more death is then enough."""
    clock = Clock()
    lengths = LethalLengths(100.0, clock)
    lengths.convicted(255, "a")
    lengths.convicted(255, "b")
    clock.now_s = 101.0
    assert lengths.current() == frozenset()
    assert lengths.convicted(255, "c")
    assert lengths.current() == {255}


def test_without_a_quarantine_nothing_is_learned_and_memory_is_bounded() -> None:
    """[resume] quarantine_ttl_s = 0."""
    off = LethalLengths(0.0, Clock())
    assert not any(off.convicted(255, name) for name in "abc")
    lengths = LethalLengths(100.0, Clock())
    for length in range(2 * LENGTHS_MAX):
        lengths.convicted(length, "a")
    assert not lengths.convicted(5, "b")
    assert lengths.convicted(2 * LENGTHS_MAX - 1, "b")
