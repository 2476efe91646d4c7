"""The six steps, on a made-up /sys, /proc and /dev, with children that answer like NVML's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from appliance.gpu.cards import Roots
from appliance.gpu.nvml import NvmlGpu, NvmlReport
from appliance.gpu.readiness import Code, Readiness, judge, look, wait


def machine(folder: Path, cards: int = 1, *, driver: bool = True, nodes: bool = True) -> Roots:
    """A box with some NVIDIA cards, a sound card of NVIDIA's and somebody else's display."""
    for index in range(cards):
        add_device(folder, f"0000:0{index + 1}:00.0", "0x10de", "0x030000")
    add_device(folder, "0000:01:00.1", "0x10de", "0x040300")
    add_device(folder, "0000:00:02.0", "0x8086", "0x030000")
    if driver:
        (folder / "proc/driver/nvidia").mkdir(parents=True)
        (folder / "proc/driver/nvidia/version").write_text("NVRM version: 595")
    (folder / "dev").mkdir()
    if nodes:
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(cards))):
            (folder / "dev" / name).touch()
    return Roots(folder / "sys", folder / "proc", folder / "dev")


def add_device(folder: Path, address: str, vendor: str, kind: str) -> Path:
    """One PCI device."""
    device = folder / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    return device


def test_no_card(tmp_path: Path) -> None:
    """A sound card of NVIDIA's is no GPU, and neither is somebody else's display."""
    assert look(machine(tmp_path, cards=0)).code is Code.NO_GPU


def test_no_driver_names_what_holds_the_card(tmp_path: Path) -> None:
    """nouveau on the card is the usual reason, and has its own cure."""
    roots = machine(tmp_path, driver=False)
    assert "Secure Boot" in look(roots).reason
    (tmp_path / "drivers/nouveau").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/driver").symlink_to(tmp_path / "drivers/nouveau")
    answer = look(roots)
    assert answer.code is Code.NO_DRIVER
    assert "nouveau" in answer.reason


@pytest.mark.parametrize(
    ("missing", "words"), [("nvidia1", "nvidia-persistenced"), ("nvidia-uvm", "nvidia-modprobe -u -c 0"), ("nvidiactl", "")]
)
def test_missing_nodes_are_named(tmp_path: Path, missing: str, words: str) -> None:
    """Each node by name, with what makes it."""
    roots = machine(tmp_path, cards=2)
    (roots.dev / missing).unlink()
    answer = look(roots)
    assert (answer.code, answer.cards) == (Code.NODES_MISSING, 2)
    assert f"/dev/{missing}" in answer.reason
    assert words in answer.reason


def test_a_node_that_exists_but_cannot_be_opened(tmp_path: Path) -> None:
    """The node of a card whose driver is not there: open() is what counts (here: a socket, which gives the same ENXIO)."""
    import socket

    roots = machine(tmp_path)
    (roots.dev / "nvidiactl").unlink()
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(roots.dev / "nvidiactl"))
        assert look(roots).code is Code.NODES_MISSING


@pytest.mark.skipif(os.geteuid() == 0, reason="root is never refused")
def test_no_permission_names_the_groups(tmp_path: Path) -> None:
    """0660 root:video is a common setting of distributions."""
    roots = machine(tmp_path)
    (roots.dev / "nvidia0").chmod(0)
    answer = look(roots)
    assert answer.code is Code.PERMISSION
    assert "video" in answer.reason


FILES = Readiness(Code.READY, 2, "2 cards")
GOOD = NvmlGpu("0000:01:00", "GPU-1", "RTX 3090", 24, 20, persistence=True)


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (NvmlReport(gpus=(GOOD, GOOD)), Code.READY, "2 cards"),
        (NvmlReport(code=9, problem="Driver Not Loaded"), Code.NO_DRIVER, "Driver Not Loaded"),
        (NvmlReport(code=12, problem="x"), Code.NO_LIBRARY, "libnvidia-ml"),
        (NvmlReport(code=18, problem="x"), Code.VERSION_MISMATCH, "reboot"),
        (NvmlReport(code=8, problem="x"), Code.POWER_CABLE, "cable"),
        (NvmlReport(code=999, problem="Unknown"), Code.DRIVER_ERROR, "999"),
        (NvmlReport(hung=True, problem="no answer within 10 s"), Code.NVML_HUNG, "10 s"),
        (NvmlReport(gpus=(GOOD,)), Code.GPU_MISSING, "1 of 2"),
        (NvmlReport(gpus=(GOOD, NvmlGpu(problem="GPU is lost"))), Code.GPU_MISSING, "GPU is lost"),
        (NvmlReport(gpus=(GOOD, NvmlGpu(persistence=False))), Code.READY, "nvidia-persistenced"),
    ],
)
def test_what_nvml_says(report: NvmlReport, code: Code, words: str) -> None:
    """Every error number that means something to an owner, in the owner's words."""
    answer = judge(FILES, report)
    assert answer.code is code
    assert words in answer.reason


async def test_waiting_ends_when_the_driver_comes_up(tmp_path: Path) -> None:
    """The nodes appear while we wait; what was waited for was told."""
    roots = machine(tmp_path, nodes=False)
    told: list[Readiness] = []

    def tell(answer: Readiness) -> None:
        told.append(answer)
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            (roots.dev / name).touch()

    async def nvml() -> NvmlReport:
        return NvmlReport(gpus=(GOOD,))

    assert (await wait(roots, 60.0, nvml, tell)).ready
    assert [answer.code for answer in told] == [Code.NODES_MISSING]


async def test_a_box_without_a_card_does_not_wait(tmp_path: Path) -> None:
    """At once, and NVML is never asked."""

    async def nvml() -> NvmlReport:
        raise AssertionError("asked")

    began_s = time.monotonic()
    answer = await wait(machine(tmp_path, cards=0), 60.0, nvml, lambda answer: None)
    assert answer.code is Code.NO_GPU
    assert time.monotonic() - began_s < 0.2


async def test_after_the_wait_fewer_cards_will_do(tmp_path: Path) -> None:
    """One of two cards is missing: waited for until gpu.wait_s, then served without."""

    async def nvml() -> NvmlReport:
        return NvmlReport(gpus=(GOOD,))

    told: list[Readiness] = []
    answer = await wait(machine(tmp_path, cards=2), 0.2, nvml, told.append)
    assert (answer.ready, answer.cards) == (True, 1)
    assert told[0].code is Code.GPU_MISSING


async def test_a_lost_card_is_left_out_of_everything(tmp_path: Path) -> None:
    """Its node is not opened (here: it is missing), it is not waited for, and the others make the machine ready."""
    roots = machine(tmp_path, cards=2)
    (roots.dev / "nvidia0").unlink()
    assert look(roots).code is Code.NODES_MISSING
    answer = look(roots, frozenset({"0000:01:00"}))
    assert (answer.code, answer.cards) == (Code.READY, 1)
    assert "0000:01:00 was lost in this boot" in answer.reason


async def test_without_another_card_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """The only card is lost: said at once, with what to do, and NVML is not asked."""

    async def nvml() -> NvmlReport:
        raise AssertionError("asked")

    answer = await wait(machine(tmp_path), 60.0, nvml, lambda answer: None, lambda: frozenset({"0000:01:00"}))
    assert answer.code is Code.GPU_LOST
    assert "reboot" in answer.reason


async def test_nvml_that_may_not_be_asked_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Beside a lost card NVML is not started again: the files of the other card are enough."""
    roots = machine(tmp_path, cards=2)

    async def nvml() -> NvmlReport:
        return NvmlReport(hung=True, problem="not asked any more in this boot")

    answer = await wait(roots, 60.0, nvml, lambda answer: None, lambda: frozenset({"0000:01:00"}))
    assert (answer.code, answer.cards) == (Code.READY, 1)
