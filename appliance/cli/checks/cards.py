"""The cards: from the PCI bus up to who uses their memory."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from appliance.cli.checks.machine import Finding, Machine, fail, ok, warn
from appliance.core.units import MIB, format_bytes

TEMPERATURE_MAX_C = 83
"""From here on a 3090 lowers its clocks."""
SMALL_BAR_BYTES = 256 * MIB
DRIVER_CHANGED = "/run/llm-appliance-driver-changed"
"""Written by the package's trigger when the driver's libraries were replaced."""
_FIELDS = (
    "index", "name", "power.limit", "power.default_limit", "temperature.gpu", "ecc.errors.uncorrected.volatile.total", "persistence_mode",
)  # fmt: skip


def check_cards(machine: Machine) -> Iterator[Finding]:
    """All of it; one line where there is no card."""
    cards = nvidia_cards(machine)
    if not cards:
        yield ok("cards", "no NVIDIA card on the PCI bus: engines compute on the CPU")
        return
    yield ok("cards", f"{len(cards)} on the PCI bus")
    yield from _driver(machine, cards)
    if machine.path("/proc/driver/nvidia/version").exists():
        yield from _versions(machine)
        yield from _nodes(machine, len(cards))
        yield _persistenced(machine)
        if not machine.has_module("pynvml"):
            yield warn("NVML", "applianced cannot ask the driver: its Python finds no pynvml", "apt install python3-pynvml (in contrib)")
        yield from _sensors(machine)
        yield _other_users(machine)
    for card in cards:
        yield from _link(card)
    yield _iommu(machine, len(cards))


def nvidia_cards(machine: Machine) -> tuple[Path, ...]:
    """Display controllers of NVIDIA."""
    found = machine.find("/sys/bus/pci/devices/*")
    return tuple(card for card in found if _text(card / "vendor") == "0x10de" and _text(card / "class")[:6] in ("0x0300", "0x0302"))


def _driver(machine: Machine, cards: Sequence[Path]) -> Iterator[Finding]:
    if machine.path("/proc/driver/nvidia/version").exists():
        return
    bound = (cards[0] / "driver").resolve().name if (cards[0] / "driver").exists() else ""
    if bound and bound != "nvidia":
        yield fail("driver", f"the card {cards[0].name} is bound to {bound}", f"blacklist {bound} in /etc/modprobe.d and reboot")
    else:
        yield fail("driver", "the NVIDIA kernel module is not loaded", "modprobe nvidia; journalctl -k says why not (Secure Boot? DKMS?)")


def _versions(machine: Machine) -> Iterator[Finding]:
    module = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", machine.read("/proc/driver/nvidia/version"))
    folders = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib64")
    libraries = {
        match[1]
        for folder in folders
        for file in machine.find(f"/{folder}/libcuda.so.*")
        if (match := re.search(r"so\.(\d+\.\d+.*)$", file.name))
    }
    if module is None or not libraries:
        yield warn("driver", "its library libcuda was not found in the usual folders", "apt install libcuda1 (of the driver's own version)")
    elif module[1] in libraries:
        yield ok("driver", f"kernel module and library are {module[1]}")
    else:
        yield fail("driver", f"the kernel module is {module[1]}, the library {' and '.join(sorted(libraries))}", "reboot")
    if (changed := machine.read(DRIVER_CHANGED)) and machine.read("/proc/uptime"):
        yield warn("driver", f"its libraries were replaced at {changed}, since this boot", "reboot before the next restart of the engine")


def _nodes(machine: Machine, count: int) -> Iterator[Finding]:
    names = ("nvidiactl", *(f"nvidia{index}" for index in range(count)), "nvidia-uvm")
    problems = 0
    for name in names:
        node = machine.path(f"/dev/{name}")
        cure = "nvidia-modprobe -u -c 0" if name == "nvidia-uvm" else "systemctl enable --now nvidia-persistenced (or nvidia-modprobe)"
        try:
            facts = node.stat()
        except OSError as error:
            problems += 1
            yield fail("nodes", f"/dev/{name}: {error.strerror}", cure)
            continue
        if not _may_use(facts, machine.user_groups):
            problems += 1
            group = facts.st_gid
            yield fail("nodes", f"/dev/{name} is closed to llm-appliance (group {group})", f"usermod -aG {group} llm-appliance")
    if not problems:
        yield ok("nodes", ", ".join(f"/dev/{name}" for name in names))


def _may_use(facts: os.stat_result, groups: frozenset[int]) -> bool:
    others, group = 0o006, 0o060
    return (
        facts.st_mode & others == others or (facts.st_mode & group == group and facts.st_gid in groups) or not stat.S_ISCHR(facts.st_mode)
    )


def _persistenced(machine: Machine) -> Finding:
    if machine.ask("systemctl", "is-active", "--quiet", "nvidia-persistenced.service").good:
        return ok("persistenced", "runs")
    return warn(
        "persistenced",
        "does not run: each start of an engine waits for the driver",
        "apt install nvidia-persistenced; systemctl enable --now nvidia-persistenced",
    )


def _sensors(machine: Machine) -> Iterator[Finding]:
    ended = machine.ask("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    if not ended.good:
        said = " ".join(ended.output.split())[:200] or "there is no such command"
        yield fail("nvidia-smi", said, "reboot" if "mismatch" in said or "Unable to determine" in said else "apt install nvidia-smi")
        return
    for line in ended.output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_FIELDS):
            yield from _card(dict(zip(_FIELDS, values, strict=True)))


def _card(card: dict[str, str]) -> Iterator[Finding]:
    name = f"card {card['index']}"
    limit, default, temperature = (_number(card[key]) for key in ("power.limit", "power.default_limit", "temperature.gpu"))
    errors = _number(card["ecc.errors.uncorrected.volatile.total"])
    yield ok(name, f"{card['name']}, {temperature:g} °C, power limit {limit:g} W of {default:g} W")
    if temperature > TEMPERATURE_MAX_C:
        yield warn(
            name,
            f"{temperature:g} °C: it lowers its clocks above {TEMPERATURE_MAX_C} °C",
            f"more air, or nvidia-smi -i {card['index']} -pl WATTS",
        )
    if limit > default:
        yield warn(name, f"power limit {limit:g} W is above its default {default:g} W", f"nvidia-smi -i {card['index']} -pl {default:g}")
    if errors > 0:
        yield fail(
            name, f"{errors:g} uncorrectable memory errors since the driver was loaded", "reboot; if they come back, replace the card"
        )
    if card["persistence_mode"] == "Disabled":
        yield warn(name, "persistence mode is off", f"nvidia-smi -i {card['index']} -pm 1, or let nvidia-persistenced do it at each boot")


def _other_users(machine: Machine) -> Finding:
    ended = machine.ask("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    others = []
    for line in ended.output.splitlines() if ended.good else ():
        pid, _, rest = line.partition(",")
        if "llm-appliance" not in machine.read(f"/proc/{pid.strip()}/cgroup"):
            process, _, used = rest.rpartition(",")
            others.append(f"{process.strip()} (pid {pid.strip()}, {format_bytes(int(_number(used)) * MIB)})")
    if others:
        return warn("memory of the cards", f"also used by {', '.join(others)}", "stop it, or lower budget.mem_fraction")
    return ok("memory of the cards", "nobody else uses it")


def _link(card: Path) -> Iterator[Finding]:
    name = f"link of {card.name}"
    width, widest = _text(card / "current_link_width"), _text(card / "max_link_width")
    if width.isdigit() and widest.isdigit():
        fastest = _text(card / "max_link_speed")
        if int(width) < int(widest):
            yield warn(name, f"PCIe x{width} where the card can x{widest}", "reseat card and riser; look at the board's lane sharing")
        else:
            yield ok(name, f"PCIe x{width}, up to {fastest}")
    bars = [line.split() for line in _text(card / "resource").splitlines()]
    if len(bars) > 1 and len(bars[1]) >= 2:
        size = int(bars[1][1], 16) - int(bars[1][0], 16) + 1
        if 1 < size <= SMALL_BAR_BYTES:
            yield warn(
                name,
                f"its memory is seen through {format_bytes(size)}: Resizable BAR is off",
                "turn on Above 4G Decoding and ReBAR in the firmware",
            )


def _iommu(machine: Machine, cards: int) -> Finding:
    kinds = {_text(file) for file in machine.find("/sys/kernel/iommu_groups/*/type")}
    translated = sorted(kind for kind in kinds if kind.startswith("DMA"))
    if translated and cards > 1:
        return warn(
            "IOMMU",
            f"translates ({', '.join(translated)}): peer-to-peer copies between cards can fault",
            "add iommu=pt to the kernel's command line and reboot",
        )
    return ok("IOMMU", "off" if not kinds else ", ".join(sorted(kinds)))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """0 for what this card does not have ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return 0.0
