"""Kernel messages that say that a card is gone for good, by number or in words, and which card it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.gpu.cards import normal_address

_PLACE = r"(?:PCI:)?(?P<place>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
# NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
_XID = re.compile(rf"NVRM: Xid \({_PLACE}[^)]*\): (?P<number>\d+)\b")
# NVRM: GPU 0000:0a:00.0: GPU has fallen off the bus.
# NVRM: GPU at 0000:01:00.0 has fallen off the bus.
# NVRM: The NVIDIA GPU 0000:0a:00.0        (the first of three lines, or of one record)
# NVRM: (PCI ID: 10de:2204) installed in this system has
# NVRM: fallen off the bus and is not responding to commands.
_NAMED = re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?{_PLACE}")
_OFF_THE_BUS = re.compile(r"NVRM: .*\bfallen\s+off\s+the\s+bus\b", re.DOTALL)
_OFF_THE_BUS_XID = 79
SILENT_XIDS = frozenset({79, 119, 120})
"""After these the driver's own calls about the card may never return."""
_SAME_MESSAGE_LINES = 3


@dataclass(frozen=True, slots=True)
class Loss:
    """One message. `address` is None where it does not say which card."""

    text: str
    address: str | None


def card_named_in(text: str) -> str | None:
    """The normal PCI address of the card that a driver's message is about."""
    match = _XID.search(text) or _NAMED.search(text)
    return normal_address(match["place"]) if match is not None else None


def silences_card(text: str) -> str | None:
    """The card that must not be asked anything after this message."""
    match = _XID.search(text)
    return normal_address(match["place"]) if match is not None and int(match["number"]) in SILENT_XIDS else None


class LossReader:
    """Reads line after line: the message of three lines names the card in its first."""

    def __init__(self) -> None:
        self._named: str | None = None
        self._age_lines = 0

    def read(self, text: str) -> Loss | None:
        """What this line says of a card that is gone."""
        self._age_lines += 1
        named = card_named_in(text)
        if named is not None:
            self._named, self._age_lines = named, 0
        match = _XID.search(text)
        if not (_OFF_THE_BUS.search(text) or (match is not None and int(match["number"]) == _OFF_THE_BUS_XID)):
            return None
        return Loss(text, named or (self._named if self._age_lines < _SAME_MESSAGE_LINES else None))
