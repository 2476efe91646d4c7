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
    assert lengths.current() == {}
    assert lengths.convicted(255, "c")
    assert not lengths.convicted(255, "d")
    assert set(lengths.current()) == {255}


def test_it_is_forgotten_and_comes_back_with_the_next_one() -> None:
    """After its time it is tried again; one more death is then enough."""
    clock = Clock()
    lengths = LethalLengths(100.0, clock)
    lengths.convicted(255, "a")
    lengths.convicted(255, "b")
    clock.now_s = 101.0
    assert lengths.current() == {}
    assert lengths.convicted(255, "c")
    assert set(lengths.current()) == {255}


def test_without_a_quarantine_nothing_is_learned_and_memory_is_bounded() -> None:
    """[resume] quarantine_ttl_s = 0."""
    off = LethalLengths(0.0, Clock())
    assert not any(off.convicted(255, name) for name in "abc")
    lengths = LethalLengths(100.0, Clock())
    for length in range(2 * LENGTHS_MAX):
        lengths.convicted(length, "a")
    assert not lengths.convicted(5, "b")
    assert lengths.convicted(2 * LENGTHS_MAX - 1, "b")


def test_a_length_that_diagnosis_names_is_refused_with_its_reason() -> None:
    """For as long as one that was convicted; advice that comes again makes it last, and says nothing new."""
    clock = Clock()
    lengths = LethalLengths(100.0, clock)
    assert lengths.advised(127, "3 of 3 crashes met it")
    same = lengths.current()
    assert same == {127: "3 of 3 crashes met it"}
    assert lengths.current() is same, "nobody has to compare what did not change"
    clock.now_s = 60.0
    assert not lengths.advised(127, "4 of 4 crashes met it")
    clock.now_s = 159.0
    assert lengths.current() == {127: "4 of 4 crashes met it"}
    clock.now_s = 161.0
    assert lengths.current() == {}
    assert not LethalLengths(0.0, clock).advised(127, "forbidden")
