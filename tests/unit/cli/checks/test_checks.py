"""`doctor` on machines that are laid out in a folder: every defect is found, named, and given its cure."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from appliance.cli.checks.box import check_box
from appliance.cli.checks.cards import check_cards
from appliance.cli.checks.host import check_host
from appliance.cli.checks.machine import Ended, Finding, Level, Machine, run_command
from appliance.cli.place import Place

SMI = "0, NVIDIA GeForce RTX 3090, 280.00, 350.00, 45, [N/A], Enabled"
BAR_32_GIB = "0x00 0x00 0x0\n0x6000000000 0x67ffffffff 0x1\n"
BAR_256_MIB = "0x00 0x00 0x0\n0x60000000 0x6fffffff 0x1\n"


class Box:
    """A machine with two healthy 3090s, to be damaged by a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.has_module: Callable[[str], bool] = lambda _: True
        self.answers: dict[str, Ended] = {
            "systemctl is-active --quiet nvidia-persistenced.service": Ended(0),
            "nvidia-smi --query-gpu": Ended(0, f"{SMI}\n{SMI.replace('0,', '1,', 1)}\n"),
            "nvidia-smi --query-compute-apps": Ended(0, "812, python3, 20000\n"),
            "systemctl show": Ended(0, "LoadState=loaded\nActiveState=active\nResult=success\nLimitMEMLOCK=infinity\nDelegate=yes\n"),
            "timedatectl": Ended(0, "NTPSynchronized=yes\n"),
            "journalctl": Ended(0, "Reached target shutdown.target\nJournal stopped\n"),
            "dpkg-query": Ended(0, "ii nvidia-driver\nii libcuda1:amd64\nun nvidia-smi\n"),
            "apt-mark": Ended(0, "nvidia-driver\nlibcuda1\n"),
        }
        for card in ("0000:01:00.0", "0000:41:00.0"):
            self.write(f"/sys/bus/pci/devices/{card}/vendor", "0x10de\n")
            self.write(f"/sys/bus/pci/devices/{card}/class", "0x030000\n")
            self.write(f"/sys/bus/pci/devices/{card}/current_link_width", "16\n")
            self.write(f"/sys/bus/pci/devices/{card}/max_link_width", "16\n")
            self.write(f"/sys/bus/pci/devices/{card}/max_link_speed", "16.0 GT/s PCIe\n")
            self.write(f"/sys/bus/pci/devices/{card}/resource", BAR_32_GIB)
        self.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.07  Fri Mar 14\n")
        self.write("/usr/lib/x86_64-linux-gnu/libcuda.so.570.133.07", "")
        self.write("/proc/uptime", "100.0 100.0\n")
        self.write("/proc/812/cgroup", "0::/llm.slice/llm-appliance.service/engine-1\n")
        for node in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
            self.write(f"/dev/{node}", "")
        self.write("/dev/shm/x", "")
        self.write("/sys/fs/cgroup/cgroup.controllers", "memory")
        self.write("/sys/kernel/iommu_groups/1/type", "identity\n")
        self.write("/proc/sys/kernel/core_pattern", "|/lib/systemd/systemd-coredump %P\n")
        self.write("/etc/apt/apt.conf.d/50unattended-upgrades", "")

    def write(self, path: str, text: str) -> None:
        """A file of the machine."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, command: Sequence[str]) -> Ended:
        """The answer of the longest beginning that fits."""
        words = " ".join(command)
        fitting = [key for key in self.answers if words.startswith(key)]
        return self.answers[max(fitting, key=len)] if fitting else Ended(None)

    def findings(self) -> list[Finding]:
        """Of the cards and of the host."""
        machine = Machine(self.root, self.run, self.has_module)
        return [*check_cards(machine), *check_host(machine, "/var/lib/llm-appliance")]

    def troubles(self) -> list[Finding]:
        """What is not ok; the size of this machine's own /dev/shm and disk aside, which the root folder shares."""
        return [finding for finding in self.findings() if finding.level is not Level.OK and finding.name not in ("/dev/shm", "disk")]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A healthy one."""
    return Box(tmp_path)


def test_a_healthy_box_has_no_trouble(box: Box) -> None:
    """Two cards, all is well: the checks do not cry wolf."""
    assert box.troubles() == []


def test_without_a_card_there_is_one_line_about_cards(tmp_path: Path) -> None:
    """And no question to nvidia-smi."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> Ended:
        asked.append(command)
        return Ended(None)

    (only,) = check_cards(Machine(tmp_path, run))
    assert only.level is Level.OK
    assert asked == []


DEFECTS = [
    ("/sys/bus/pci/devices/0000:01:00.0/current_link_width", "4\n", Level.WARN, "PCIe x4 where the card can x16", "reseat"),
    ("/sys/bus/pci/devices/0000:01:00.0/resource", BAR_256_MIB, Level.WARN, "256.00 MiB: Resizable BAR is off", "Above 4G"),
    ("/sys/kernel/iommu_groups/1/type", "DMA-FQ\n", Level.WARN, "translates (DMA-FQ)", "iommu=pt"),
    (
        "/proc/driver/nvidia/version",
        "Kernel Module  570.86.10\n",
        Level.FAIL,
        "kernel module is 570.86.10, the library 570.133.07",
        "reboot",
    ),
    ("/run/llm-appliance-driver-changed", "2026-11-30T10:00:00Z\n", Level.WARN, "replaced at 2026-11-30T10:00:00Z", "reboot"),
    ("/proc/812/cgroup", "0::/user.slice\n", Level.WARN, "python3 (pid 812, 19.53 GiB)", "budget.mem_fraction"),
    ("/proc/sys/kernel/core_pattern", "core\n", Level.WARN, "core_pattern is 'core'", "systemd-coredump"),
]


@pytest.mark.parametrize(("path", "text", "level", "reason", "cure"), DEFECTS)
def test_a_file_that_tells_of_a_defect(box: Box, path: str, text: str, level: Level, reason: str, cure: str) -> None:
    """One defect, one finding."""
    box.write(path, text)
    (finding,) = box.troubles()
    assert finding.level is level
    assert reason in finding.reason
    assert cure in finding.cure


ANSWERS = [
    ("systemctl is-active --quiet nvidia-persistenced.service", Ended(3), Level.WARN, "waits for the driver", "enable --now"),
    ("nvidia-smi --query-gpu", Ended(18, "Failed to initialize NVML: Driver/library version mismatch"), Level.FAIL, "mismatch", "reboot"),
    ("nvidia-smi --query-gpu", Ended(None, "no answer within 10 s"), Level.FAIL, "no answer", ""),
    ("nvidia-smi --query-gpu", Ended(0, SMI.replace("45,", "91,")), Level.WARN, "91 °C", "-pl"),
    ("nvidia-smi --query-gpu", Ended(0, SMI.replace("280.00", "390.00")), Level.WARN, "390 W is above its default 350 W", "-pl 350"),
    ("nvidia-smi --query-gpu", Ended(0, SMI.replace("[N/A]", "2")), Level.FAIL, "2 uncorrectable", "replace the card"),
    ("nvidia-smi --query-gpu", Ended(0, SMI.replace("Enabled", "Disabled")), Level.WARN, "persistence mode is off", "-pm 1"),
    ("timedatectl", Ended(0, "NTPSynchronized=no\n"), Level.WARN, "not synchronised", "set-ntp"),
    ("apt-mark", Ended(0, "nvidia-driver\n"), Level.WARN, "1 packages of the driver", "apt-mark hold libcuda1"),
    (
        "journalctl --boot=-2",
        Ended(0, "the last line before the power went\n"),
        Level.WARN,
        "boot -2 ended without a shutdown",
        "journalctl -b -2",
    ),
]


@pytest.mark.parametrize(("command", "answer", "level", "reason", "cure"), ANSWERS)
def test_a_command_that_tells_of_a_defect(box: Box, command: str, answer: Ended, level: Level, reason: str, cure: str) -> None:
    """One defect, one finding."""
    box.answers[command] = answer
    (finding,) = box.troubles()
    assert finding.level is level
    assert reason in finding.reason
    assert cure in finding.cure


@pytest.mark.parametrize(
    ("line", "name", "level"),
    [
        ("ActiveState=failed", "service", Level.FAIL),
        ("LimitMEMLOCK=8388608", "memlock", Level.WARN),
        ("Delegate=no", "cgroup", Level.WARN),
    ],
)
def test_a_unit_that_somebody_changed(box: Box, line: str, name: str, level: Level) -> None:
    """The later of two equal keys counts, as in the answer of `systemctl show` after an edit."""
    box.answers["systemctl show"] = Ended(0, box.answers["systemctl show"].output + line)
    (finding,) = box.troubles()
    assert (finding.name, finding.level) == (name, level)


def test_a_missing_node_names_its_cure(box: Box) -> None:
    """nvidia-uvm is made by nobody but nvidia-modprobe or CUDA itself."""
    (box.root / "dev/nvidia-uvm").unlink()
    (finding,) = box.troubles()
    assert finding.level is Level.FAIL
    assert finding.cure == "nvidia-modprobe -u -c 0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_node_that_is_closed_to_the_service(box: Box) -> None:
    """0660 of a group that it is not in, and fine once it is."""
    node = box.root / "dev/nvidia0"
    node.unlink()
    os.mknod(node, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
    node.chmod(0o660)  # mknod heeds the umask
    os.chown(node, 0, 44)
    (finding,) = box.troubles()
    assert finding.level is Level.FAIL
    assert "usermod -aG 44 llm-appliance" in finding.cure
    assert all(
        found.level is Level.OK
        for found in check_cards(Machine(box.root, box.run, box.has_module, frozenset([44])))
        if found.name == "nodes"
    )


def test_a_control_plane_without_nvml_says_so(box: Box) -> None:
    """Debian has pynvml in contrib only, so the package cannot depend on it."""
    box.has_module = lambda _: False
    (finding,) = box.troubles()
    assert "python3-pynvml" in finding.cure


def test_nouveau_is_named(box: Box) -> None:
    """The usual reason why the driver does not load."""
    (box.root / "proc/driver/nvidia/version").unlink()
    driver = box.root / "sys/bus/pci/drivers/nouveau"
    driver.mkdir(parents=True)
    (box.root / "sys/bus/pci/devices/0000:01:00.0/driver").symlink_to(driver)
    (finding,) = box.troubles()
    assert "bound to nouveau" in finding.reason


def test_a_command_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi on a lost card may never answer."""
    monkeypatch.setattr("appliance.cli.checks.machine.COMMAND_TIMEOUT_S", 0.1)
    assert run_command(["sleep", "60"]) == Ended(None, "no answer within 0.1 s")
    assert run_command(["/no/such/program"]).code is None


def _box(tmp_path: Path, text: str) -> list[Finding]:
    config = tmp_path / "appliance.toml"
    config.write_text(text)
    place = Place(config_path=config, state_dir=tmp_path)
    return [finding for finding in check_box(Machine(tmp_path, lambda _: Ended(None)), place, tmp_path) if finding.level is not Level.OK]


def test_a_wrong_configuration_is_all_there_is_to_say(tmp_path: Path) -> None:
    """Each error with its key; the checks that need the configuration are not made."""
    (finding,) = _box(tmp_path, "[engine]\nthreds = 1\n")
    assert finding.level is Level.FAIL
    assert "engine.threds" in finding.reason


def test_a_model_whose_download_broke_off(tmp_path: Path) -> None:
    """A shard that the index names and the folder lacks, and one that is empty."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        (model / name).touch()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    (finding,) = _box(tmp_path, f'[model]\npath = "{model}"\n[gateway]\nport = 0\n')
    assert finding.level is Level.FAIL
    assert "lacks b.safetensors and a.safetensors is empty" in finding.reason
