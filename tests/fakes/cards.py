"""A box with NVIDIA cards: a made-up /sys, /proc and /dev, and tests/fakes/nvml.c in place of the driver's library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from appliance.gpu.cards import Roots

SOURCE = Path(__file__).parent / "nvml.c"
HAS_COMPILER = shutil.which("gcc") is not None


def uuid_of(index: int) -> str:
    """As the library says it."""
    return f"GPU-0000000{index}-0000-0000-0000-000000000000"


def make_box(folder: Path, cards: int = 1, *, nodes: bool = True) -> Roots:
    """So many cards, their driver loaded, their nodes there or not."""
    roots = Roots(folder / "sys", folder / "proc", folder / "dev")
    roots.dev.mkdir(parents=True)
    for index in range(cards):
        name = f"0000:0{index + 1}:00.0"
        device, known = roots.sys / "bus/pci/devices" / name, roots.proc / "driver/nvidia/gpus" / name
        device.mkdir(parents=True)
        known.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030000\n")
        (known / "information").write_text(f"Model: \t\t RTX 3090\nGPU UUID:  \t {uuid_of(index)}\nDevice Minor: \t {index}\n")
    (roots.proc / "driver/nvidia").mkdir(parents=True, exist_ok=True)
    (roots.proc / "driver/nvidia/version").write_text("NVRM version: 595")
    if nodes:
        make_nodes(roots, cards)
    return roots


def make_nodes(roots: Roots, cards: int = 1) -> None:
    """As nvidia-persistenced does."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(cards))):
        (roots.dev / name).touch()


class FakeNvml:
    """The library, built into a folder, and the file that its cards obey."""

    def __init__(self, folder: Path, cards: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, SOURCE], check=True)
        self._orders, self._calls = folder / "orders", folder / "calls"
        self._cards = cards
        self.environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(self._orders), "FAKE_NVML_CALLS": str(self._calls)}
        self.order()

    @property
    def command(self) -> tuple[str, ...]:
        """The real child on this library."""
        assignments = (f"{name}={value}" for name, value in self.environment.items())
        return ("/usr/bin/env", *assignments, sys.executable, "-m", "appliance.gpu.nvml_child")

    def order(self, *words: str) -> None:
        """What holds from the next call on; no words: all is well."""
        fresh = self._orders.with_suffix(".new")
        fresh.write_text("".join(f"{word}\n" for word in (f"cards {self._cards}", *words)))
        fresh.replace(self._orders)

    def calls(self) -> list[str]:
        """Every call since this was asked last, as "function card"."""
        if not self._calls.exists():
            return []
        fetched = self._calls.with_suffix(".seen")
        self._calls.replace(fetched)
        return fetched.read_text().splitlines()
