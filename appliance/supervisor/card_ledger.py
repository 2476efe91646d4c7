"""Which cards are not to be touched any more, over restarts of applianced, and what an engine is told of the others."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from appliance.gpu.cards import Card, Roots, cards_on_bus
from appliance.supervisor.incidents import IncidentStore

KEY = "cards"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class LostCard:
    """One card. `for_good`: off the bus, which nothing but a reboot cures; else a reset may, and a person says when."""

    address: str
    why: str
    for_good: bool


class CardLedger:
    """Owns the record of lost cards. It is of one boot: the next one begins with all of them.

    There is one record a box. Who has one card of several sees this card alone through a ledger of its own (`of_card`).
    """

    def __init__(self, roots: Roots, boot_id: str | None, store: IncidentStore) -> None:
        self._roots = roots
        self._boot_id = boot_id or ""
        self._store = store
        self._lost: dict[str, LostCard] = {}
        self._recall()

    def of_card(self, address: str) -> CardLedger:
        """The same record for one card."""
        narrowed = copy.copy(self)
        narrowed._roots = replace(self._roots, only=address)
        return narrowed

    @property
    def lost(self) -> frozenset[str]:
        """Their addresses."""
        return frozenset(address for address in self._lost if self._roots.concerns(address))

    @property
    def lost_anywhere(self) -> frozenset[str]:
        """Those of others too: nobody may touch them."""
        return frozenset(self._lost)

    @property
    def words(self) -> str:
        """For the status; empty where none is lost."""
        return "; ".join(f"{address} is not used: {self._lost[address].why[:200]}" for address in sorted(self.lost))

    def note(self, address: str, why: str, *, for_good: bool) -> bool:
        """Leave this card alone. Whether that is news."""
        known = self._lost.get(address)
        if known is not None and (known.for_good or not for_good):
            return False
        self._lost[address] = LostCard(address, why, for_good)
        self._keep()
        return known is None

    def forgive(self) -> None:
        """A person asked for a new try: what a reset may have cured is tried again."""
        curable = [address for address in self.lost if not self._lost[address].for_good]
        for address in curable:
            del self._lost[address]
        if curable:
            self._keep()

    def ours(self) -> tuple[Card, ...]:
        """On the bus, and not kept from us by our own CUDA_VISIBLE_DEVICES."""
        chosen = _chosen(cards_on_bus(self._roots.whole), os.environ.get(_VISIBLE))
        return tuple(card for card in chosen if self._roots.concerns(card.address))

    def usable(self) -> tuple[Card, ...]:
        """Ours, and not lost."""
        return tuple(card for card in self.ours() if card.address not in self._lost)

    @property
    def first_uuid(self) -> str:
        """Of the first usable card, as what an engine's memory figures are kept by; empty where none says."""
        return next((card.uuid for card in self.usable() if card.uuid), "")

    def environment(self) -> Mapping[str, str]:
        """What keeps an engine off the cards that are lost or another engine's: CUDA then does not so much as enumerate them."""
        if not self._lost and not self._roots.only:
            return {}
        cards = self.usable()
        if all(card.uuid for card in cards):
            return {_VISIBLE: ",".join(card.uuid for card in cards)}
        order = [card.address for card in cards_on_bus(self._roots.whole)]
        return {_VISIBLE: ",".join(str(order.index(card.address)) for card in cards), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def _recall(self) -> None:
        kept = self._store.recall(KEY)
        if kept.get("boot_id") == self._boot_id:
            self._lost = {card["address"]: LostCard(card["address"], card["why"], card["for_good"]) for card in kept["lost"]}

    def _keep(self) -> None:
        lost = [{"address": card.address, "why": card.why, "for_good": card.for_good} for card in self._lost.values()]
        self._store.keep(KEY, {"boot_id": self._boot_id, "lost": lost})


def _chosen(cards: tuple[Card, ...], visible: str | None) -> tuple[Card, ...]:
    """The owner's own choice, as CUDA reads it: UUIDs (or their beginnings), or numbers, here in the bus's order."""
    if visible is None:
        return cards
    words = [word.strip() for word in visible.split(",") if word.strip()]
    numbered = {str(index): card for index, card in enumerate(cards)}
    found = [numbered.get(word) or next((card for card in cards if card.uuid and card.uuid.startswith(word)), None) for word in words]
    return tuple(card for card in found if card is not None)
