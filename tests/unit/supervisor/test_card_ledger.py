"""Which cards are left alone, for how long, and what the engine is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.supervisor.card_ledger import CardLedger
from appliance.supervisor.incidents import IncidentStore
from tests.fakes.cards import make_box, uuid_of

FIRST, SECOND = "0000:01:00", "0000:02:00"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IncidentStore]:
    """A real database."""
    made = IncidentStore(tmp_path, 10)
    yield made
    made.close()


def test_a_lost_card_is_hidden_from_the_engine(tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID, so that CUDA does not so much as enumerate the dead one; nothing is set while all is well."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ledger = CardLedger(make_box(tmp_path / "box", cards=2), "boot-1", store)
    assert ledger.environment() == {}
    assert ledger.note(FIRST, "Xid 79", for_good=True)
    assert not ledger.note(FIRST, "GPU has fallen off the bus", for_good=True)
    assert ledger.environment() == {"CUDA_VISIBLE_DEVICES": uuid_of(1)}
    assert [card.address for card in ledger.usable()] == [SECOND]


def test_without_uuids_the_bus_order_is_forced(tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has not said them: numbers, and CUDA is told to count as the bus does."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    roots = make_box(tmp_path / "box", cards=2)
    (roots.proc / "driver/nvidia/gpus/0000:02:00.0/information").unlink()
    ledger = CardLedger(roots, "boot-1", store)
    ledger.note(FIRST, "Xid 79", for_good=True)
    assert ledger.environment() == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("visible", "left"), [("0", []), ("1", [SECOND]), (uuid_of(1), [SECOND]), (uuid_of(0), []), ("1,0", [SECOND])])
def test_the_owners_choice_holds(
    tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch, visible: str, left: list[str]
) -> None:
    """A card that the owner keeps from us is not taken because another one died."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ledger = CardLedger(make_box(tmp_path / "box", cards=2), "boot-1", store)
    ledger.note(FIRST, "Xid 79", for_good=True)
    assert [card.address for card in ledger.usable()] == left


def test_it_is_remembered_for_this_boot(tmp_path: Path, store: IncidentStore) -> None:
    """A restart of applianced changes nothing; a reboot begins with all cards."""
    roots = make_box(tmp_path / "box", cards=2)
    CardLedger(roots, "boot-1", store).note(FIRST, "Xid 79", for_good=True)
    assert CardLedger(roots, "boot-1", store).lost == {FIRST}
    assert CardLedger(roots, "boot-2", store).lost == frozenset()


def test_a_person_may_try_a_card_again_that_a_reset_cures(tmp_path: Path, store: IncidentStore) -> None:
    """Xid 62 or 119: until `resume`. Off the bus: not before the next boot, whoever asks, and even if it was called curable first."""
    ledger = CardLedger(make_box(tmp_path / "box", cards=2), "boot-1", store)
    ledger.note(FIRST, "GSP time-out", for_good=False)
    ledger.note(SECOND, "GSP time-out", for_good=False)
    assert not ledger.note(SECOND, "Xid 79", for_good=True)
    ledger.forgive()
    assert ledger.lost == {SECOND}
    assert "Xid 79" in ledger.words


def test_one_card_of_several_is_seen_alone(tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is shown its own card, lost or not; there is one record, in which each sees its own, and all what nobody may touch."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    roots = make_box(tmp_path / "box", cards=3)
    whole = CardLedger(roots, "boot-1", store)
    assert [card.address for card in whole.ours()] == [SECOND, FIRST], "the owner's choice, in the owner's order"
    first, second = whole.of_card(FIRST), whole.of_card(SECOND)
    assert first.environment() == {"CUDA_VISIBLE_DEVICES": uuid_of(0)}
    assert second.environment() == {"CUDA_VISIBLE_DEVICES": uuid_of(1)}
    assert first.first_uuid == uuid_of(0)
    assert first.note(FIRST, "Xid 119", for_good=False)
    assert (first.lost, second.lost, second.lost_anywhere, whole.lost) == ({FIRST}, frozenset(), {FIRST}, {FIRST})
    assert (first.usable(), [card.address for card in first.ours()]) == ((), [FIRST])
    assert [card.address for card in second.usable()] == [SECOND]
    assert ("Xid 119" in first.words, second.words) == (True, "")
    second.forgive()
    assert first.lost == {FIRST}, "another's resume is none of its own"
    assert CardLedger(roots, "boot-1", store).lost == {FIRST}
    first.forgive()
    assert whole.lost == frozenset()


def test_without_uuids_one_card_has_its_number_on_the_whole_bus(
    tmp_path: Path, store: IncidentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its number among the cards that its engine is shown."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    roots = make_box(tmp_path / "box", cards=2)
    (roots.proc / "driver/nvidia/gpus/0000:02:00.0/information").unlink()
    ledger = CardLedger(roots, "boot-1", store).of_card(SECOND)
    assert ledger.environment() == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
