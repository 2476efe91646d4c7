"""NVIDIA cards by their PCI address, from files alone: nothing here talks to a card, so it is safe beside one that is lost."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's files are; other places in tests.

    Attributes:
        only: address of the one card that whoever has this may know of; empty: all of them.
    """

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    only: str = ""

    @property
    def whole(self) -> Roots:
        """With every card."""
        return replace(self, only="")

    def concerns(self, address: str | None) -> bool:
        """Whether what is about this card is about ours: not where it is known to be another."""
        return not self.only or address in (None, self.only)


@dataclass(frozen=True, slots=True)
class Card:
    """One card on the bus.

    Attributes:
        address: as `normal_address` writes it.
        device: its folder in sysfs.
        minor: N of /dev/nvidiaN.
        uuid: what CUDA_VISIBLE_DEVICES takes; empty before the driver has seen the card.
    """

    address: str
    device: Path
    minor: int
    uuid: str


def normal_address(text: str) -> str | None:
    """The one spelling of a PCI address: "0000:0a:00" of 0a:00.0, 00000000:0A:00.0 and PCI:0000:0a:00; None of anything else."""
    match = _ADDRESS.fullmatch(text.strip().removeprefix("PCI:"))
    if match is None:
        return None
    domain, bus, device = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def cards_on_bus(roots: Roots) -> tuple[Card, ...]:
    """The display controllers of NVIDIA, in the bus's order."""
    found: list[Card] = []
    for device in sorted((roots.sys / "bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            address = normal_address(device.name)
            if vendor == NVIDIA_VENDOR and kind[:6] in DISPLAY_CLASSES and address is not None:
                found.append(_card(roots, address, device, len(found)))
    return tuple(card for card in found if roots.concerns(card.address))


def _card(roots: Roots, address: str, device: Path, position: int) -> Card:
    """The driver keeps what it knows of a card in its own memory; where it has not seen the card, the position is the best guess."""
    said = ""
    with contextlib.suppress(OSError):
        said = (roots.proc / "driver/nvidia/gpus" / device.name / "information").read_text(errors="replace")
    minor, uuid = _MINOR.search(said), _UUID.search(said)
    return Card(address, device, int(minor[1]) if minor else position, uuid[1] if uuid else "")
