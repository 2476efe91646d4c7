"""What is laid out for a verdict, and what is not."""

from __future__ import annotations

import time

import pytest

from appliance import diagnosis
from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation
from appliance.core.evidence import Evidence, Source
from appliance.gpu.kernel_line import KernelLine
from appliance.supervisor.evidence_desk import (
    FAST_CHARS,
    FAST_HEAD,
    FAST_TAIL,
    SILENT_KERNEL,
    WINDOW_LINES,
    EvidenceDesk,
    brief,
    unasked,
    window,
)
from appliance.supervisor.hang import Hang, Silence
from appliance.supervisor.log_ring import LogLine
from appliance.supervisor.process import ExitStatus
from tests.unit.supervisor.machine_cases import make_diagnosis


def verdict(desk: EvidenceDesk, *lines: str) -> Cause:
    """What diagnosis makes of the desk."""
    log = [LogLine(number, time.time(), text) for number, text in enumerate(lines, 1)]
    evidence = desk.collect(log)
    return unasked(diagnosis.diagnose(evidence, stopped_by_us=False, engine="native"), evidence).cause


def test_a_death_by_our_own_signal_is_not_the_cause() -> None:
    """We ended a hung engine with SIGKILL: the hang is the cause, not a killer."""
    desk = EvidenceDesk("boot")
    desk.add_hang(Hang(Silence.HEALTH, 12.0, 10.0, 2, "no answer"), "T")
    desk.add_exit(ExitStatus(signal="SIGKILL"), frozenset({"SIGKILL", "SIGABRT"}))
    assert verdict(desk) is Cause.ENGINE_WATCHDOG


def test_a_death_by_somebody_elses_signal_is() -> None:
    """The same signal, not sent by us."""
    desk = EvidenceDesk("boot")
    desk.add_exit(ExitStatus(signal="SIGKILL"), frozenset())
    assert verdict(desk) is Cause.KILLED_UNKNOWN


def test_a_kernel_that_says_nothing_was_asked_all_the_same() -> None:
    """That no OOM killer is on record means more where somebody listened, and the doubt says nothing else."""
    deaf, heard = EvidenceDesk("boot"), EvidenceDesk("boot")
    heard.add_kernel(KernelLine("usb 1-1: new high-speed USB device", time.time(), 1, replayed=True, uptime_s=1.0))
    doubts = []
    for desk in (deaf, heard):
        desk.begin_life()
        desk.add_exit(ExitStatus(signal="SIGKILL"), frozenset())
        found = diagnosis.diagnose(desk.collect([]), stopped_by_us=False, engine="native")
        assert found.cause is Cause.KILLED_UNKNOWN
        doubts.append(" ".join(found.doubts))
    assert "neither the kernel's log" in doubts[0]
    assert "kernel's log" not in doubts[1]


def test_an_oom_kill_of_the_cgroup_names_the_killer() -> None:
    """memory.events counted one: the kernel's OOM killer."""
    desk = EvidenceDesk("boot")
    desk.add_exit(ExitStatus(signal="SIGKILL"), frozenset())
    desk.add_oom_kills(1)
    assert verdict(desk) is Cause.HOST_OOM


def test_an_orderly_end_that_nobody_asked_for() -> None:
    """Exit code 0 after its own /health said that it drains: somebody sent a stop signal."""
    desk = EvidenceDesk("boot")
    desk.add_ending("it was told to stop: it refuses new requests and finishes 2")
    desk.add_exit(ExitStatus(code=0), frozenset())
    assert verdict(desk, "[2026-11-30 10:00:00] INFO The engine is ready.") is Cause.EXTERNAL_SIGTERM


def test_no_death_is_called_healthy() -> None:
    """Nothing wrong in the log and nobody asked: unknown, never ok."""
    desk = EvidenceDesk("boot")
    desk.add_exit(ExitStatus(code=0), frozenset())
    assert verdict(desk, "[2026-11-30 10:00:00] INFO The engine is ready.") is Cause.UNKNOWN


def test_a_new_life_begins_with_a_clean_desk() -> None:
    """Facts of the old life go, the kernel's lines stay."""
    desk = EvidenceDesk("boot")
    desk.add_exit(ExitStatus(code=1), frozenset())
    desk.add_kernel(KernelLine("NVRM: x", time.time(), 5, replayed=False))
    desk.begin_life()
    assert [item.source for item in desk.collect(())] == [Source.KERNEL_LOG]


def test_old_kernel_lines_are_not_about_this_life() -> None:
    """A kernel line of an hour before the start explains nothing; one without a time may."""
    desk = EvidenceDesk("boot")
    desk.add_kernel(KernelLine("NVRM: old", time.time() - 3600, 1, replayed=True, uptime_s=time.monotonic() - 3600))
    desk.add_kernel(KernelLine("undated", None, 2, replayed=True))
    assert [item.text for item in desk.collect(())] == ["undated"]


def test_a_flood_does_not_delay_the_verdict() -> None:
    """Thousands of long complaints: beginning and end are read, lines are cut, facts of other sources are all there."""
    flood = [Evidence(Source.ENGINE_LOG, f"{number} " + "x" * 5000, line=number) for number in range(1, 4001)]
    read = brief([*flood, Evidence(Source.EXIT, "killed by SIGKILL")])
    assert len(read) == FAST_HEAD + FAST_TAIL + 1
    assert (read[0].line, read[-2].line, read[-1].source) == (1, 4000, Source.EXIT)
    assert max(len(item.text) for item in read) == FAST_CHARS


def test_the_incident_keeps_the_end_and_what_was_cited() -> None:
    """Thousands of lines do not go into the database; the root does, however early it stood."""
    evidence = [Evidence(Source.ENGINE_LOG, f"line {number}", line=number) for number in range(1, 1001)]
    evidence.append(Evidence(Source.EXIT, "killed by SIGKILL"))
    kept = window(evidence, make_diagnosis(root=Citation(Source.ENGINE_LOG, 3, "line 3")))
    assert [item.text for item in kept[:2]] == ["line 3", f"line {1001 - WINDOW_LINES}"]
    assert kept[-1].source is Source.EXIT
    assert len(kept) == WINDOW_LINES + 2


def test_a_card_that_this_life_never_had_explains_nothing_about_it() -> None:
    """Its messages, before and after, are left out; so is what the driver said before, of whichever card. Others count."""
    desk = EvidenceDesk("boot")
    desk.add_kernel(KernelLine("NVRM: Xid (PCI:0000:01:00): 79, off the bus", time.time(), 1, replayed=False), "0000:01:00")
    desk.add_kernel(KernelLine("NVRM: fallen off the bus and is not responding to commands.", time.time(), 2, replayed=False))
    desk.begin_life(frozenset({"0000:01:00"}))
    desk.add_kernel(KernelLine("NVRM: Xid (PCI:0000:01:00): 154, again", time.time(), 3, replayed=False), "0000:01:00")
    assert [item.text for item in desk.collect([])] == [SILENT_KERNEL]
    desk.add_kernel(KernelLine("NVRM: Xid (PCI:0000:02:00): 13, pid=1", time.time(), 4, replayed=False), "0000:02:00")
    desk.add_kernel(KernelLine("Out of memory: Killed process 1 (python)", time.time(), 5, replayed=False))
    assert len(desk.collect([])) == 2


def test_what_ended_another_life_explains_nothing_about_this_one() -> None:
    """The OOM killer's line, or an application's Xid, from before the start: another engine's end. What lasts does count."""
    desk = EvidenceDesk("boot")
    for number, text in enumerate(
        [
            "Out of memory: Killed process 1 (python)",
            "NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=python, MMU Fault",
            "NVRM: Xid (PCI:0000:01:00): 62, pid=1, name=python, halt",
            "NVRM: API mismatch: the client has the version 515.48.07",
            "INFO: task python3:3310 blocked for more than 241 seconds.",
        ]
    ):
        desk.add_kernel(KernelLine(text, time.time(), number, replayed=False))
    desk.begin_life()
    assert [item.text[:9] for item in desk.collect([])] == ["NVRM: Xid", "NVRM: API", "INFO: tas"]
    assert verdict(desk) is Cause.GPU_MCU_HALT


def test_a_wall_clock_that_jumps_loses_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """NTP sets the clock back by a day in the middle of a life: what is said after that is still about it."""
    desk = EvidenceDesk("boot")
    desk.begin_life()
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() - 86400.0)
    desk.add_kernel(KernelLine("NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=python, MMU Fault", time.time(), 1, replayed=False))
    desk.add_report("client_disconnect", ())
    assert {item.source for item in desk.collect([])} == {Source.KERNEL_LOG, Source.GATEWAY}
    assert verdict(desk) is Cause.CUDA_ILLEGAL_ACCESS


def test_xids_are_counted_by_their_number() -> None:
    """Also those from before our start, as far back as the kernel's log goes."""
    desk = EvidenceDesk("boot")
    for number, replayed in ((31, False), (31, True), (79, False)):
        desk.add_kernel(KernelLine(f"NVRM: Xid (PCI:0000:01:00): {number}, pid=1", time.time(), number, replayed=replayed, uptime_s=1.0))
    desk.add_kernel(KernelLine("NVRM: GPU 0000:01:00.0: RmInitAdapter failed!", time.time(), 9, replayed=False))
    desk.begin_life()
    assert desk.xids == {31: 2, 79: 1}
