"""Kernel messages through journald: a child that prints as journalctl does."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from appliance.gpu import kernel_journal
from appliance.gpu.kernel_journal import Journal, parse_entry
from appliance.gpu.kernel_line import KernelLine
from appliance.gpu.kernel_log import KernelLog

XID = "NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus."


def entry(text: object, uptime_s: float, **changes: str) -> bytes:
    """A line of `journalctl --output=json`."""
    fields = {
        "MESSAGE": text, "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "PRIORITY": "3", "_BOOT_ID": "b",
        "_SOURCE_MONOTONIC_TIMESTAMP": str(int(uptime_s * 1e6)), "__REALTIME_TIMESTAMP": "1764460800000000", "SEQNUM": "7",
    }  # fmt: skip
    return json.dumps(fields | changes).encode()


def test_an_entry_is_taken_apart() -> None:
    """Text (as bytes where it is not clean), time, sequence; what was said before we began is replayed."""
    assert parse_entry(entry(XID, 12.5), began_s=20.0) == KernelLine(XID, 1764460800.0, 7, True, 12.5)
    assert parse_entry(entry(list(b"a\xffb"), 30.0), began_s=20.0) == KernelLine("a\ufffdb", 1764460800.0, 7, False, 30.0)


@pytest.mark.parametrize("raw", [b"", b"no json", b"[]", b"{}", entry(XID, 1.0, SYSLOG_FACILITY="1"), entry(XID, 1.0, _TRANSPORT="stdout")])
def test_what_is_no_message_of_the_kernel_is_nothing(raw: bytes) -> None:
    """A program that wrote an Xid into the log is not believed here either."""
    assert parse_entry(raw, 0.0) is None


async def test_entries_come_as_they_are_said(tmp_path: Path) -> None:
    """Old ones replayed, new ones as news; half an entry waits for its end; when the child ends, the sensor says so."""
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    first, second = entry("old", now_s - 100), entry("new", now_s + 100)
    whole = first + b"\n" + second + b"\n"
    half = len(first) + 20
    code = f"import sys, time; sys.stdout.buffer.write({whole[:half]!r}); sys.stdout.flush(); time.sleep(0.3); "
    code += f"sys.stdout.buffer.write({whole[half:]!r})"
    lines: list[KernelLine] = []
    told: list[str] = []
    journal = Journal(lines.extend, told.append, (sys.executable, "-c", code))
    journal.start()
    async with asyncio.timeout(10):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    assert [(line.text, line.replayed) for line in lines] == [("old", True), ("new", False)]
    assert "from the journal instead" in told[0]
    assert "has ended" in told[1]
    journal.drain()
    journal.stop()


async def test_the_journal_is_the_second_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/kmsg may not be read: the journal is, and the sensor tells both; without journalctl it tells that too."""

    def refuse(self: KernelLog) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(KernelLog, "_open", refuse)
    code = f"print({entry(XID, 1.0).decode()!r}, flush=True); import time; time.sleep(600)"
    monkeypatch.setattr(kernel_journal.Journal.__init__, "__defaults__", ((sys.executable, "-c", code),))
    lines: list[KernelLine] = []
    log = KernelLog("/dev/kmsg")
    log.start(lines.extend)
    async with asyncio.timeout(10):
        while not lines:
            await asyncio.sleep(0.01)
    assert (lines[0].text, lines[0].replayed) == (XID, True)
    assert log.problem is not None
    assert "Operation not permitted" in log.problem
    assert "from the journal instead" in log.problem
    log.stop()
    monkeypatch.setattr(kernel_journal.Journal.__init__, "__defaults__", (("/no/such/journalctl",),))
    log = KernelLog("/dev/kmsg")
    log.start(lines.extend)
    assert "nor can the journal be read" in str(log.problem)
    log.drain()
    log.stop()
