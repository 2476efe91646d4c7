"""What journald gets: the sentence, the fields, and values of any kind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import structlog

from appliance.supervisor import journal
from appliance.supervisor.journal import VALUE_MAX_BYTES, connected, datagram, sentence
from appliance.supervisor.log_outlet import configure


def parsed(data: bytes) -> dict[str, str]:
    """journald's reading of a datagram."""
    fields, rest = {}, data
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            length = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + length], rest[8 + length + 1 :]
        fields[name.decode()] = value.decode()
    return fields


def test_the_sentence_is_the_message() -> None:
    """And what can be searched for is a field."""
    fields = parsed(datagram({"event": "serving on rung 0", "state": "serving", "generation": 7, "level": "info"}))
    assert fields["MESSAGE"] == "serving on rung 0 generation=7"
    assert fields["PRIORITY"] == "6"
    assert fields["APPLIANCE_STATE"] == "serving"
    assert fields["APPLIANCE_GENERATION"] == "7"
    assert fields["SYSLOG_IDENTIFIER"] == "applianced"


def test_lines_and_tracebacks_stay_whole() -> None:
    """Values with line ends are sent with their length, so that none of them can forge a field."""
    event = {"event": "failed", "error": "no\nMESSAGE=forged", "exception": "Traceback\n  ZeroDivisionError", "level": "error"}
    fields = parsed(datagram(event))
    assert fields["MESSAGE"] == "failed: no\nMESSAGE=forged\nTraceback\n  ZeroDivisionError"
    assert fields["PRIORITY"] == "3"
    assert fields["APPLIANCE_ERROR"] == "no\nMESSAGE=forged"


def test_an_endless_line_is_cut() -> None:
    """A datagram that is too large would be lost."""
    assert len(datagram({"event": "x" * 1_000_000, "engine": 3})) < VALUE_MAX_BYTES + 1000


def test_an_engines_line_is_as_it_said_it() -> None:
    """`journalctl -u llm-appliance` is an engine log that `diagnose` reads."""
    assert sentence({"event": "CUDA error: out of memory", "engine": 3, "level": "info"}) == "CUDA error: out of memory"


def test_only_where_stderr_is_the_journal(tmp_path: Path) -> None:
    """JOURNAL_STREAM is inherited by children whose standard error goes elsewhere."""
    with (tmp_path / "log").open("w") as log:
        facts = os.fstat(log.fileno())
        assert connected({"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino + 1}"}, log.fileno()) is None
        assert connected({}, log.fileno()) is None


def test_the_log_goes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From structlog to the socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "socket"))
    listener.settimeout(10)
    monkeypatch.setattr(journal, "SOCKET", str(tmp_path / "socket"))
    with (tmp_path / "log").open("w") as log:
        facts = os.fstat(log.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        outlet = configure(log.fileno())
        try:
            structlog.get_logger().warning("parked", generation=2)
            fields = parsed(listener.recv(65536))
        finally:
            outlet.close()
            structlog.reset_defaults()
            listener.close()
    assert fields["MESSAGE"] == "parked generation=2"
    assert fields["PRIORITY"] == "4"
