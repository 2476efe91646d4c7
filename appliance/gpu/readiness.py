"""Can the cards be used? Six questions in order; the first that is answered no gives the reason.

Steps 1 to 3 look at files only. Steps 4 to 6 ask NVML, in a child (nvml.py), and only where there is a card.
A device node that exists proves nothing (the bare library makes /dev/nvidiactl without a driver): it is opened.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.core.units import format_duration
from appliance.gpu.cards import Card, Roots, cards_on_bus
from appliance.gpu.nvml import NvmlReport

POLL_FIRST_S = 0.25
POLL_MAX_S = 2.0


class Code(enum.Enum):
    """Where it stands. The value is the word in the status and in `doctor`."""

    READY = "ready"
    NO_GPU = "no-gpu"
    NO_DRIVER = "no-driver"
    NODES_MISSING = "nodes-missing"
    PERMISSION = "permission"
    NO_LIBRARY = "no-library"
    VERSION_MISMATCH = "version-mismatch"
    POWER_CABLE = "power-cable"
    DRIVER_ERROR = "driver-error"
    NVML_HUNG = "nvml-hung"
    GPU_MISSING = "gpu-missing"
    GPU_LOST = "gpu-lost"


@dataclass(frozen=True, slots=True)
class Readiness:
    """One answer. `cards`: usable ones where ready, else those that the PCI bus shows."""

    code: Code
    cards: int
    reason: str

    @property
    def ready(self) -> bool:
        """The engine may start."""
        return self.code is Code.READY


def look(roots: Roots, lost: frozenset[str] = frozenset()) -> Readiness:
    """Steps 1 to 3. Cards that were lost in this boot do not count, and nothing of them is opened."""
    on_bus = cards_on_bus(roots)
    cards = tuple(card for card in on_bus if card.address not in lost)
    count = len(cards)
    if not cards:
        alone = "" if roots.only else " and no other card is left"
        gone = f"{' and '.join(sorted(lost))} was lost in this boot{alone}: reboot, or switch the power off and on"
        return Readiness(Code.GPU_LOST, 0, gone) if lost else Readiness(Code.NO_GPU, 0, "no NVIDIA card on the PCI bus")
    if not (roots.proc / "driver/nvidia/version").exists():
        return Readiness(Code.NO_DRIVER, count, f"the NVIDIA driver is not loaded{_driver_hint(cards[0])}")
    for name in ("nvidiactl", *(f"nvidia{card.minor}" for card in cards), "nvidia-uvm"):
        problem = _open_problem(roots.dev / name)
        if problem is not None:
            code = Code.PERMISSION if problem in (errno.EACCES, errno.EPERM) else Code.NODES_MISSING
            cure = "add the service's user to the groups video and render" if code is Code.PERMISSION else _node_hint(name)
            return Readiness(code, count, f"/dev/{name}: {os.strerror(problem)}; {cure}")
    without = f" ({' and '.join(sorted(lost))} was lost in this boot)" if lost else ""
    return Readiness(Code.READY, count, f"{count} card{'s' if count > 1 else ''}{without}")


_NVML_CODES = {
    8: (Code.POWER_CABLE, "a card lacks its auxiliary power: check the cable"),
    9: (Code.NO_DRIVER, "NVML finds no driver"),
    12: (Code.NO_LIBRARY, "libnvidia-ml.so.1 is missing: install the driver's libraries"),
    18: (Code.VERSION_MISMATCH, "the driver's library and its kernel module differ in version: reboot"),
}


def judge(files: Readiness, report: NvmlReport) -> Readiness:
    """Steps 4 and 5: what NVML says on top of the files."""
    if report.hung:
        return Readiness(Code.NVML_HUNG, files.cards, report.problem)
    if report.code:
        code, words = _NVML_CODES.get(report.code, (Code.DRIVER_ERROR, f"NVML fails with error {report.code}"))
        return Readiness(code, files.cards, f"{words} ({report.problem})")
    usable = [gpu for gpu in report.gpus if gpu.problem is None]
    notes = [f"{gpu.name or gpu.address or 'a card'}: {gpu.problem}" for gpu in report.gpus if gpu.problem is not None]
    if len(usable) < files.cards:
        return Readiness(Code.GPU_MISSING, len(usable), "; ".join([f"{len(usable)} of {files.cards} cards answer", *notes]))
    if any(gpu.persistence is False for gpu in usable):
        notes.append("persistence mode is off: enable nvidia-persistenced, or each start waits for the driver")
    return Readiness(Code.READY, len(usable), "; ".join([files.reason, *notes]))


async def wait(
    roots: Roots,
    wait_s: float,
    ask_nvml: Callable[[], Awaitable[NvmlReport]] | None,
    tell: Callable[[Readiness], None],
    lost: Callable[[], frozenset[str]] = frozenset,
) -> Readiness:
    """Until the cards can be used. Without any card: at once. After `wait_s` fewer cards than expected will do.

    Args:
        ask_nvml: None where the cards have served in this boot already: their files are enough, and no restart waits for NVML.
        tell: called with each answer that is not the last.
        lost: addresses of cards that were lost in this boot; may grow while we wait.
    """
    began_s, pause_s = time.monotonic(), POLL_FIRST_S
    while True:
        now = look(roots, lost())
        if now.ready and ask_nvml is not None:
            now = judge(now, await ask_nvml())
        late = time.monotonic() - began_s >= wait_s
        if now.ready or now.code in (Code.NO_GPU, Code.GPU_LOST):
            return now
        if late and now.code is Code.GPU_MISSING and now.cards > 0:
            return Readiness(Code.READY, now.cards, now.reason)
        if now.code is Code.NVML_HUNG and (late or lost()):
            # The files say that the cards are there; NVML is not asked again beside a lost one, and an engine may do without it.
            return Readiness(Code.READY, now.cards, f"{now.cards} by the files alone ({now.reason})")
        waited = f" (for {format_duration(time.monotonic() - began_s)} now, gpu.wait_s = {wait_s:g})" if late else ""
        tell(Readiness(now.code, now.cards, now.reason + waited))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_MAX_S)


def _driver_hint(card: Card) -> str:
    driver = card.device / "driver"
    bound = driver.resolve().name if driver.exists() else ""
    if bound and bound != "nvidia":
        return f": the card is bound to {bound}; blacklist it and reboot"
    return "; is it installed, and allowed by Secure Boot?"


def _node_hint(name: str) -> str:
    return "nvidia-modprobe -u -c 0 makes it" if name == "nvidia-uvm" else "nvidia-persistenced or nvidia-modprobe makes it"


def _open_problem(node: Path) -> int | None:
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno
    return None
