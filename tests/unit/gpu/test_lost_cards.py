"""Which kernel message says that which card is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.gpu.cards import cards_on_bus, normal_address
from appliance.gpu.lost_cards import Loss, LossReader, card_named_in, silences_card
from tests.fakes.cards import make_box, uuid_of

LOST = [
    ("NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus.", "0000:0a:00"),
    ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "0000:05:00"),
    ("NVRM: Xid (PCI:0000:3b:00.0): 79, GPU has fallen off the bus", "0000:3b:00"),
    ("NVRM: Xid (0000:01:00): 79, C 00000005", "0000:01:00"),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 79, GPU has fallen off the bus.", "0000:01:00"),
    ("NVRM: GPU 0000:0a:00.0: GPU has fallen off the bus.", "0000:0a:00"),
    ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", "0000:01:00"),
    (
        "NVRM: The NVIDIA GPU 0000:0a:00.0\nNVRM: (PCI ID: 10de:2204) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        "0000:0a:00",
    ),
    ("NVRM: fallen off the bus and is not responding to commands.", None),
]
NOT_LOST = [
    "NVRM: Xid (PCI:0000:0a:00): 13, pid=79, name=python, Graphics Exception",
    "NVRM: Xid (PCI:0000:0a:00): 790, made up",
    "NVRM: Xid (PCI:0000:0a:00): 119, pid=1, name=x, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
    "NVRM: GPU at PCI:0000:0a:00: GPU-79797979-0000",
    "usb 1-1: device has fallen off the bus",
]


@pytest.mark.parametrize(("text", "address"), LOST)
def test_a_lost_card_is_recognised(text: str, address: str | None) -> None:
    """By number or in words, in every form that drivers have used, with the card where the message names it."""
    assert LossReader().read(text) == Loss(text, address)


@pytest.mark.parametrize("text", NOT_LOST)
def test_other_messages_are_not_a_lost_card(text: str) -> None:
    """Other Xids, a pid 79, other buses."""
    assert LossReader().read(text) is None


def test_a_message_of_three_lines_is_about_the_card_in_its_first() -> None:
    """As a journal hands it out, line by line; what stands far above belongs to something else."""
    reader = LossReader()
    lines = ("NVRM: The NVIDIA GPU 0000:0a:00.0", "NVRM: (PCI ID: 10de:2204) installed in this system has")
    assert [reader.read(line) for line in lines] == [None, None]
    last = "NVRM: fallen off the bus and is not responding to commands."
    assert reader.read(last) == Loss(last, "0000:0a:00")
    for _ in range(5):
        reader.read("usb 1-1: new device")
    assert reader.read(last) == Loss(last, None)


def test_a_card_behind_a_dead_system_processor_is_not_asked_either() -> None:
    """Xid 119 and 120: the engine may or may not survive, NVML would hang."""
    assert silences_card("NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=nvidia-smi, Timeout after 6s") == "0000:9b:00"
    assert silences_card("NVRM: Xid (PCI:0000:9b:00): 13, pid=120, name=python") is None
    assert card_named_in("NVRM: Xid (PCI:0000:9b:00): 13, pid=120, name=python") == "0000:9b:00"


@pytest.mark.parametrize("text", ["0a:00.0", "0000:0a:00", "00000000:0A:00.0", "PCI:0000:0a:00"])
def test_an_address_has_one_spelling(text: str) -> None:
    """The kernel's, sysfs's and NVML's."""
    assert normal_address(text) == "0000:0a:00"
    assert normal_address(f"{text} and more") is None


def test_cards_are_found_in_files(tmp_path: Path) -> None:
    """Address, minor and UUID; without the driver's own file the position stands for the minor."""
    roots = make_box(tmp_path, cards=2)
    assert [(card.address, card.minor, card.uuid) for card in cards_on_bus(roots)] == [
        ("0000:01:00", 0, uuid_of(0)),
        ("0000:02:00", 1, uuid_of(1)),
    ]
    (roots.proc / "driver/nvidia/gpus/0000:02:00.0/information").unlink()
    assert [(card.minor, card.uuid) for card in cards_on_bus(roots)] == [(0, uuid_of(0)), (1, "")]
