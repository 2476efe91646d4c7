"""Finding the core of a process that died, and reading its stack: with a real crash where this kernel writes a file and there is gdb."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.supervisor import core_dumps
from appliance.supervisor.aftermath import evidence_of
from appliance.supervisor.core_dumps import Death, Dump, core_file, dump_of

CLOCK_NANOSLEEP = ("230", "115")
"""Its number on x86-64 and on arm64."""
JOURNAL = """\
           PID: 4711 (python3)
        Signal: 11 (SEGV)
       Storage: /var/lib/systemd/coredump/core.python3.999.4711.zst (present)
       Message: Process 4711 (python3) of user 999 dumped core.

                Stack trace of thread 4711:
                #0  0x00007f3c8a2b1d3c paged_decode (libengine.so + 0x1d3c)
                #1  0x00007f3c8a2b2000 run_batch (libengine.so + 0x2000)
                ELF object binary architecture: AMD x86-64
"""


def death_in(folder: Path, pid: int = 4711, name: str = "SIGSEGV") -> Death:
    """Just now."""
    return Death(pid, sys.executable, name, time.time(), str(folder))


@pytest.mark.parametrize(
    ("pattern", "file"),
    [
        ("core", "core"),
        ("core", "core.4711"),
        ("core.%p", "core.4711"),
        ("core.%e.%p.%t", "core.python3.4711.1764460800"),
        ("cores/core", "cores/core"),
    ],
)
def test_the_kernels_file_is_found_by_its_pattern(tmp_path: Path, pattern: str, file: str) -> None:
    """Relative ones lie in the working directory; the pid stands where the pattern or core_uses_pid puts it."""
    (tmp_path / "cores").mkdir()
    (tmp_path / "core.4712").touch()
    (tmp_path / file).write_bytes(b"\x7fELF")
    (tmp_path / "scores").touch()
    assert core_file(pattern, death_in(tmp_path)) == tmp_path / file


def test_an_old_core_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """One of last week under the same name."""
    (tmp_path / "core").touch()
    os.utime(tmp_path / "core", (0, time.time() - 600))
    assert core_file("core", death_in(tmp_path)) is None
    assert core_file("/no/such/folder/core", death_in(tmp_path)) is None
    assert core_file("/var/%h/core", death_in(tmp_path)) is None


async def test_signals_that_leave_no_core_are_not_looked_for(tmp_path: Path) -> None:
    """kill -9 and kill -TERM."""
    (tmp_path / "core").touch()
    assert await dump_of(death_in(tmp_path, name="SIGKILL")) is None
    assert await dump_of(death_in(tmp_path, name="SIGTERM")) is None


async def test_systemd_coredump_is_asked_where_it_has_the_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that is a pipe: `coredumpctl info PID` has the path and the frames already. (A stand-in prints what systemd 252 does.)"""
    (tmp_path / "pattern").write_text("|/lib/systemd/systemd-coredump %P %u %g %s %t 9223372036854775808 %h\n")
    program = tmp_path / "coredumpctl"
    program.write_text(f"#!/bin/sh\ncase \"$*\" in *'info 4711') cat <<'X'\n{JOURNAL}X\n;; *) exit 1;; esac\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(core_dumps, "CORE_PATTERN", tmp_path / "pattern")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    dump = await dump_of(death_in(tmp_path))
    assert dump is not None
    assert dump.path == "/var/lib/systemd/coredump/core.python3.999.4711.zst"
    assert [frame.split()[2] for frame in dump.frames] == ["paged_decode", "run_batch"]
    assert await dump_of(death_in(tmp_path, pid=1)) is None


async def test_a_reader_that_hangs_or_fails_is_given_up(tmp_path: Path) -> None:
    """The deadline holds, and nothing of it is left."""
    began_s = time.monotonic()
    assert await core_dumps.run(("sleep", "60"), 0.2) == ""
    assert time.monotonic() - began_s < 5
    assert await core_dumps.run(("false",), 5.0) == ""
    assert await core_dumps.run(("/no/such/program",), 5.0) == ""


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb")
@pytest.mark.skipif(core_dumps.CORE_PATTERN.read_text().startswith("|"), reason="cores go to a program here")
def test_a_real_core_gives_real_frames(tmp_path: Path) -> None:
    """A process dies of SIGSEGV with a core file; gdb names the function in which it died."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (2**30, resource.getrlimit(resource.RLIMIT_CORE)[1])),
    )
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{child.pid}/syscall").read_text().split()[0] not in CLOCK_NANOSLEEP:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    child.send_signal(signal.SIGSEGV)
    child.wait()
    death = Death(child.pid, sys.executable, "SIGSEGV", time.time(), str(tmp_path))
    dump = asyncio.run(dump_of(death))
    assert dump is not None
    assert dump.frames[0].startswith("#0")
    assert any("sleep" in frame for frame in dump.frames), dump.frames
    first, *frames = evidence_of(dump, death)
    assert first.data["signal"] == "SIGSEGV"
    assert [item.line for item in frames] == list(range(1, len(dump.frames) + 1))


def test_a_dump_that_nobody_can_read_is_evidence_too(tmp_path: Path) -> None:
    """No gdb: the path alone."""
    (only,) = evidence_of(Dump(str(tmp_path / "core"), ()), death_in(tmp_path))
    assert str(tmp_path / "core") in only.text


def test_the_dumps_of_the_last_day_are_told_by_their_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What systemd-coredump has put into the journal, of this program and not of another that the same interpreter runs."""
    rows = [
        {"COREDUMP_CMDLINE": "/opt/engine/bin/python -m appliance.engine --model m", "COREDUMP_TIMESTAMP": "1796000000000000",
         "COREDUMP_SIGNAL_NAME": "SIGSEGV", "COREDUMP_FILENAME": "/var/lib/systemd/coredump/core.python.zst"},
        {"COREDUMP_CMDLINE": "/usr/bin/python3 /usr/bin/unattended-upgrade", "COREDUMP_TIMESTAMP": "1796000000000000"},
        {"COREDUMP_CMDLINE": "/opt/engine/bin/python", "COREDUMP_TIMESTAMP": "no number"},
    ]  # fmt: skip
    journal = tmp_path / "journalctl"
    journal.write_text("#!/bin/sh\ncat <<'X'\n" + "\n".join(map(json.dumps, rows)) + "\nnot json\nX\n")
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(core_dumps, "_pattern", lambda: "|/usr/lib/systemd/systemd-coredump %P")
    (dump,) = asyncio.run(core_dumps.dumps_of("/opt/engine/bin/python", 0.0))
    assert (dump.program, dump.signal, dump.time_s) == ("python", "SIGSEGV", 1796000000.0)
