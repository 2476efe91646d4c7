"""`appliancectl logs`: the journal of the two units as one, by a journalctl that answers as systemd's does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.journal import entry_of
from appliance.diagnosis import is_fatal_line
from tests.unit.cli.conftest import Ctl

FATAL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.94 GiB. GPU 0 has a total capacity of 23.56 GiB"
SUPERVISOR, GATEWAY = "llm-appliance.service", "llm-appliance-gateway.service"


def record(text: Any, unit: str = SUPERVISOR, priority: int = 6, **fields: str) -> dict[str, Any]:
    """As `journalctl -o json` prints it."""
    stamp = "1796000000123456"
    return {"__REALTIME_TIMESTAMP": stamp, "__CURSOR": "s=1", "_SYSTEMD_UNIT": unit, "PRIORITY": str(priority), "MESSAGE": text, **fields}


RECORDS = [
    record("serving on rung 0 (generation 3)"),
    record("listening on http://127.0.0.1:8000", GATEWAY),
    record("Decode batch. tokens=8", APPLIANCE_ENGINE="3"),
    record(FATAL, APPLIANCE_ENGINE="3"),
    record("restarted on rung 1 because of this", priority=4),
]


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name; what it was asked stands in the file `asked`."""
    records = tmp_path / "records"
    records.write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    program = tmp_path / "bin" / "journalctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *--follow*) exit 0;; esac\ncat {records}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_everything_in_one_order_with_the_fatal_line_marked(ctl: Ctl, journalctl: Path) -> None:
    """Who said it, of which life, and by which pattern an end is known."""
    said = ctl("logs")
    assert said.code == 0
    lines = said.out.splitlines()
    assert [line.split()[2] for line in lines] == ["supervisor", "gateway", "engine", "engine", "supervisor"]
    assert "engine 3" in lines[2]
    assert f"fatal ({is_fatal_line(FATAL)}): torch.OutOfMemoryError" in lines[3]
    assert "warning: restarted" in lines[4]
    assert "\x1b" not in said.out
    assert f"--unit={SUPERVISOR} --unit={GATEWAY} --lines=2000" in (journalctl / "asked").read_text()


@pytest.mark.parametrize(("flag", "count"), [("--engine", 2), ("--gateway", 1), ("--supervisor", 2)])
def test_one_of_them_alone(ctl: Ctl, journalctl: Path, flag: str, count: int) -> None:
    """And the last lines of that one, however many the others have."""
    assert len(ctl("logs", flag).out.splitlines()) == count
    assert len(ctl("logs", flag, "-n", "1").out.splitlines()) == 1


def test_systemds_own_lines_and_the_spares_are_not_called_the_supervisors(ctl: Ctl, journalctl: Path) -> None:
    """What systemd says of the units, a dump that it took, and the next engine: each by its name, shown with the part it belongs to."""
    told = [
        record("Started llm-appliance.service.", "init.scope", UNIT=SUPERVISOR),
        record("Process 71 (python) of user 999 dumped core.", "systemd-coredump@1.service", COREDUMP_UNIT=SUPERVISOR),
        record("Load weight begin.", APPLIANCE_SPARE="4712"),
        record(FATAL, APPLIANCE_SPARE="4712"),
        record("the engine was started"),
    ]
    (journalctl / "records").write_text("".join(json.dumps(each) + "\n" for each in told))
    assert [line.split()[2] for line in ctl("logs").out.splitlines()] == ["systemd", "systemd", "spare", "spare", "supervisor"]
    assert "fatal" not in ctl("logs").out, "no engine that served has ended"
    assert len(ctl("logs", "--supervisor").out.splitlines()) == 3
    assert len(ctl("logs", "--engine").out.splitlines()) == 2


def test_a_journal_that_is_closed_to_this_user_is_not_called_empty(ctl: Ctl, journalctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """journalctl says nothing then and succeeds: members of the service's group alone would look for their lines elsewhere."""
    (journalctl / "records").write_text("")
    monkeypatch.setattr("appliance.cli.journal.os.geteuid", lambda: 12345)
    monkeypatch.setattr("appliance.cli.journal.os.getegid", lambda: 12345)
    monkeypatch.setattr("appliance.cli.journal.os.getgroups", list)
    for arguments in ((), ("--follow",)):
        said = ctl("logs", *arguments)
        assert (said.code, said.out) == (4, "")
        assert "12345 may not read what services write to the journal" in said.err
        assert "usermod -aG systemd-journal 12345" in said.err


def test_as_data_and_followed(ctl: Ctl, journalctl: Path) -> None:
    """A line each; following goes on behind the last record that was read."""
    said = ctl("logs", "--json", "--follow", "--since", "10min ago")
    entries = [json.loads(line) for line in said.out.splitlines()]
    assert [entry["who"] for entry in entries] == ["supervisor", "gateway", "engine", "engine", "supervisor"]
    assert entries[3]["fatal"] == is_fatal_line(FATAL)
    assert entries[0]["time_s"] == 1796000000.123456
    first, second = (journalctl / "asked").read_text().splitlines()
    assert "--since=10min ago" in first
    assert "--follow --after-cursor=s=1" in second


def test_what_is_wrong_is_said(ctl: Ctl, journalctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty journal, a time that is none, no permission, no systemd."""
    program = journalctl / "bin" / "journalctl"
    for script, code, words in (
        ("exit 0", 1, "nothing of them"),
        ("echo 'Failed to parse timestamp: soon' >&2; exit 1", 1, "Failed to parse timestamp"),
        ("echo 'No journal files were opened due to insufficient permissions.' >&2; exit 1", 4, "systemd-journal"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        said = ctl("logs")
        assert (said.code, said.out) == (code, "")
        assert words in said.err
    monkeypatch.setenv("PATH", str(journalctl))
    said = ctl("logs")
    assert said.code == 1
    assert "journalctl cannot be run" in said.err


def test_bytes_and_controls_of_an_engine_do_no_harm() -> None:
    """Text that is no UTF-8 comes as numbers; a cursor that is moved is shown and not moved."""
    entry = entry_of(record(list(b"\xff\x1b[2Jhello"), APPLIANCE_ENGINE="1"), is_fatal_line)
    assert "hello" in entry.text
    assert "\x1b" not in entry.text
    assert entry_of({}, is_fatal_line).who == "supervisor"
