"""The machine around the cards."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator

from appliance.cli.checks.machine import Finding, Machine, fail, ok, properties, warn
from appliance.core.units import GIB, format_bytes

DISK_WARN_BYTES = 10 * GIB
DISK_FAIL_BYTES = GIB
SHM_MIN_BYTES = GIB
"""NCCL and engines with several processes pass tensors through /dev/shm; containers often have 64 MiB."""
BOOTS = 3
_END_OF_BOOT = re.compile(r"Journal stopped|Reached target .*(?:[Ss]hutdown|[Rr]eboot|[Pp]ower.?[Oo]ff)|Shutting down\.")


def check_host(machine: Machine, state_dir: str) -> Iterator[Finding]:
    """In the order in which trouble starts."""
    yield _python()
    yield from _disk(machine, state_dir)
    yield _shared_memory(machine)
    yield from _unit(machine)
    yield _cgroup(machine)
    yield _core_dumps(machine)
    yield _clock(machine)
    yield from _driver_upgrades(machine)
    yield from _boots(machine)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if importlib.util.find_spec("ensurepip") is None:
        return warn("Python", f"{version} cannot make environments, so no engine can be set up", "apt install python3-venv")
    return ok("Python", version)


def _disk(machine: Machine, state_dir: str) -> Iterator[Finding]:
    folder = machine.path(state_dir)
    while not folder.exists():
        folder = folder.parent
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    words = f"{format_bytes(free)} free below {state_dir}"
    if free < DISK_FAIL_BYTES:
        yield fail("disk", words, "free some: incidents can no longer be kept")
    elif free < DISK_WARN_BYTES:
        yield warn("disk", f"{words}: too little for another model or engine", f"du -sh {state_dir}/*")
    else:
        yield ok("disk", words)


def _shared_memory(machine: Machine) -> Finding:
    try:
        facts = os.statvfs(machine.path("/dev/shm"))
    except OSError as error:
        return fail("/dev/shm", f"{error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    size = facts.f_blocks * facts.f_frsize
    if size < SHM_MIN_BYTES:
        return warn("/dev/shm", f"only {format_bytes(size)}", "mount -o remount,size=8G /dev/shm")
    return ok("/dev/shm", format_bytes(size))


def _unit(machine: Machine) -> Iterator[Finding]:
    ended = machine.ask("systemctl", "show", "--property=LoadState,ActiveState,Result,LimitMEMLOCK,Delegate", "llm-appliance.service")
    facts = properties(ended.output) if ended.good else {}
    if facts.get("LoadState") != "loaded":
        yield ok("service", "the package is not installed here; `appliancectl run` serves in the foreground")
        return
    if facts.get("ActiveState") == "failed":
        yield fail("service", f"systemd has given it up ({facts.get('Result')})", "journalctl -u llm-appliance; then appliancectl resume")
    else:
        yield ok("service", facts.get("ActiveState", ""))
    if facts.get("LimitMEMLOCK") not in ("infinity", str(2**64 - 1)):
        yield warn("memlock", f"LimitMEMLOCK is {facts.get('LimitMEMLOCK')}: CUDA cannot pin memory", "systemctl revert llm-appliance")
    if facts.get("Delegate") != "yes":
        yield warn("cgroup", "Delegate= is off: engines are cleared away by process group alone", "systemctl revert llm-appliance")


def _cgroup(machine: Machine) -> Finding:
    if machine.path("/sys/fs/cgroup/cgroup.controllers").exists():
        return ok("cgroup", "version 2")
    return warn(
        "cgroup",
        "the legacy hierarchy: no kill and no out-of-memory count by control group",
        "boot with systemd.unified_cgroup_hierarchy=1",
    )


def _core_dumps(machine: Machine) -> Finding:
    pattern = machine.read("/proc/sys/kernel/core_pattern")
    if "systemd-coredump" in pattern:
        return ok("core dumps", "kept by systemd-coredump")
    return warn(
        "core dumps", f"core_pattern is {pattern!r}: a crash in native code leaves nothing to look at", "apt install systemd-coredump"
    )


def _clock(machine: Machine) -> Finding:
    synchronised = properties(machine.ask("timedatectl", "show", "--property=NTPSynchronized").output).get("NTPSynchronized")
    if synchronised == "no":
        return warn("clock", "not synchronised: evidence of several logs cannot be put in order", "timedatectl set-ntp true")
    return ok("clock", "synchronised" if synchronised == "yes" else "no timedatectl to ask")


def _driver_upgrades(machine: Machine) -> Iterator[Finding]:
    listed = machine.ask("dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Package}\\n", "nvidia-*", "libnvidia-*", "libcuda1*")
    installed = {line[3:].split(":")[0].strip() for line in listed.output.splitlines() if line.startswith("ii")}
    if not installed or not machine.find("/etc/apt/apt.conf.d/*unattended-upgrades*"):
        return
    loose = sorted(installed - set(machine.ask("apt-mark", "showhold").output.split()))
    if loose:
        yield warn(
            "driver upgrades",
            f"unattended-upgrades may replace {len(loose)} packages of the driver under a running engine",
            f"apt-mark hold {' '.join(loose)}",
        )
    else:
        yield ok("driver upgrades", "the driver's packages are on hold")


def _boots(machine: Machine) -> Iterator[Finding]:
    """A boot whose journal does not end with a shutdown ended with a crash, a power cut, or a reset."""
    unclean = []
    for boot in range(-1, -BOOTS - 1, -1):
        ended = machine.ask("journalctl", f"--boot={boot}", "--lines=60", "--output=cat", "--no-pager", "--quiet")
        if not ended.good or not ended.output.strip():
            break
        if not _END_OF_BOOT.search(ended.output):
            unclean.append(boot)
    if unclean:
        numbers = ", ".join(map(str, unclean))
        yield warn(
            "earlier boots", f"boot {numbers} ended without a shutdown", f"appliancectl diagnose --since 7d; journalctl -b {unclean[0]} -k"
        )
    else:
        yield ok("earlier boots", "ended cleanly, as far as the journal goes back")
