"""Faults of boots that are over, and of cards that the engine outlived, are not this engine's."""

from __future__ import annotations

import json

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, read_evidence

LOST = "NVRM: Xid (PCI:0000:0a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
BANNER = "Linux version 6.12.6-arch1-1 (linux@archlinux)"
SEPARATOR = "-- Boot 6c1f0b2ad1c24b0fb8a4a6f3f2c7c9d1 --"
FAILED = [
    "[2026-01-09 10:00:00 TP0] Decode batch, #running-req: 1, #token: 9000, token usage: 0.08",
    "[2026-01-09 10:00:05 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
]
HEALTHY = [
    "[2026-01-09 10:00:00] The server is fired up and ready to roll!",
    "[2026-01-09 10:30:00 TP0] Decode batch, #running-req: 1, #token: 9000, token usage: 0.08",
]


def kernel(*lines: tuple[str, str]) -> str:
    """A kernel's log as journalctl prints it; separators as they are."""
    return "\n".join(text if text == SEPARATOR else f"Jan {stamp} den kernel: {text}" for stamp, text in lines)


def verdict(engine: list[str], log: str) -> Diagnosis:
    """Of an engine's log and the kernel's."""
    return diagnose([*read_evidence("\n".join(engine), Source.ENGINE_LOG), *read_evidence(log, Source.KERNEL_LOG)])


OLD = [
    kernel(("03 21:10:55", LOST), ("03 21:12:01", "reboot: Restarting system"), ("", SEPARATOR), ("09 08:00:03", BANNER)),
    kernel(("03 21:10:55", LOST), ("03 21:11:00", "usb 1-1: new device"), ("03 21:15:03", BANNER), ("09 08:00:09", "eth0: link up")),
    kernel(("03 21:10:55", LOST), ("03 22:00:00", "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  565.77"), ("04 08:00:09", "x")),
    "\n".join(
        json.dumps({"_BOOT_ID": boot, "__REALTIME_TIMESTAMP": f"{time_s}000000", "_TRANSPORT": "kernel", "MESSAGE": text})
        for boot, time_s, text in [
            ("a" * 32, 1767400000, LOST),
            ("a" * 32, 1767400100, "reboot: Restarting system"),
            ("b" * 32, 1767900000, BANNER),
        ]
    ),
]


@pytest.mark.parametrize("log", OLD, ids=["separator", "banner", "driver", "boot id"])
def test_what_another_boot_lost_is_not_lost_now(log: str) -> None:
    """Divided by whatever tells of a boot; the engine's clock tells which was its own."""
    assert verdict(HEALTHY, log).cause is Cause.OK_NORMAL
    found = verdict(FAILED, log)
    assert found.cause is Cause.CUDA_LAUNCH_FAILURE
    assert any(item.cause is Cause.GPU_OFF_BUS and "another boot" in item.reason for item in found.refuted)


@pytest.mark.parametrize("log", OLD[:1], ids=["separator"])
def test_without_a_clock_nobody_is_sure_which_boot_it_was(log: str) -> None:
    """The last one is likelier, and the report says what else it may be."""
    found = verdict([line.partition("] ")[2] or line for line in FAILED], log)
    assert (found.cause, found.confidence) == (Cause.CUDA_LAUNCH_FAILURE, Confidence.LOW)
    assert any("no clock to tell" in doubt for doubt in found.doubts)


def test_the_boot_that_the_engine_ended_in_counts_whatever_came_after() -> None:
    """Lost at its end, rebooted then."""
    log = kernel(
        ("08 08:00:03", BANNER),
        ("09 10:00:03", LOST),
        ("09 10:10:00", "reboot: Restarting system"),
        ("", SEPARATOR),
        ("09 10:12:00", BANNER),
    )
    found = verdict(FAILED, log)
    assert (found.cause, found.confidence) == (Cause.GPU_OFF_BUS, Confidence.HIGH)


def test_what_the_firmware_kept_is_of_the_boot_before() -> None:
    """BERT: at the start of this boot it tells how the last one ended; of an engine that ended then, it is the cause."""
    record = [
        "BERT: Error records from previous boot:",
        "[Hardware Error]: event severity: fatal",
        "[Hardware Error]:   vendor_id: 0x10de, device_id: 0x2204",
    ]
    log = kernel(("09 09:50:00", BANNER), *(("09 09:50:01", line) for line in record), ("09 09:50:09", "nvidia-uvm: Loaded the UVM driver"))
    assert verdict(HEALTHY, log).cause is Cause.OK_NORMAL
    assert verdict(HEALTHY, log.replace("Jan 09 09:50", "Jan 09 10:50")).cause is Cause.PCIE_ERROR


def test_an_engine_that_went_on_computing_was_not_on_the_lost_card() -> None:
    """Half an hour of tokens; the other card is named, and the verdict is not sure."""
    found = verdict(HEALTHY, kernel(("09 10:05:00", LOST)))
    assert (found.cause, found.confidence) != (Cause.GPU_OFF_BUS, Confidence.HIGH)
    assert any("went on computing for 1500 s" in doubt for doubt in found.doubts)
    assert verdict(HEALTHY, kernel(("09 10:30:05", LOST))).cause is Cause.GPU_OFF_BUS


def test_a_reset_counts_for_the_engine_that_was_up_until_then() -> None:
    """Weeks before its time the host went away too, in order or not."""
    before = [("01 08:00:00", "eth0: link up"), ("", SEPARATOR), ("02 08:00:00", BANNER)]
    after = [("", SEPARATOR), ("09 10:31:00", BANNER)]
    assert verdict(HEALTHY, kernel(*before)).cause is Cause.OK_NORMAL
    assert verdict(HEALTHY, kernel(*before, *after)).cause is Cause.HOST_POWER_RESET
    in_order = [("01 08:00:01", "reboot: Restarting system"), *before[1:]]
    assert verdict(HEALTHY, kernel(before[0], *in_order, *after)).cause is Cause.HOST_POWER_RESET


def test_another_machines_kernel_is_doubted() -> None:
    """Both logs name their host; a domain makes no other of it."""
    engine = [f"Jan 09 10:00:0{number} gpu1 sglang[77]: {line}" for number, line in enumerate(FAILED)]
    for host, confidence in (("gpu2", Confidence.LOW), ("gpu1.example", Confidence.HIGH)):
        found = verdict(engine, kernel(("09 10:00:01", LOST)).replace(" den ", f" {host} "))
        assert (found.cause, found.confidence) == (Cause.GPU_OFF_BUS, confidence)
        assert host not in " ".join(found.doubts)


def test_a_fault_of_long_ago_is_not_certain_where_the_engine_has_no_clock() -> None:
    """Within one boot nothing else tells; with a clock the window of time does."""
    engine = [line.partition("] ")[2] or line for line in FAILED]
    for last, confidence in (("09 10:30:00", Confidence.HIGH), ("11 10:30:00", Confidence.MEDIUM)):
        found = verdict(engine, kernel(("09 10:00:03", LOST), (last, "eth0: link up")))
        assert (found.cause, found.confidence) == (Cause.GPU_OFF_BUS, confidence)
    assert verdict(FAILED, kernel(("09 10:00:03", LOST), ("11 10:30:00", "eth0: link up"))).confidence is Confidence.HIGH
