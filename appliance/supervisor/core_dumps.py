"""The core dump of a process that died: where it is, and the top frames of its stack, by coredumpctl or by gdb.

Everything here takes seconds and is done beside the engine that is already back: at the lowest priority, with a deadline, in children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.diagnosis.flight import CoreDump

DUMPING_SIGNALS = frozenset({"SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS", "SIGXCPU", "SIGXFSZ"})
FRAMES = 12
DEADLINE_S = 60.0
OUTPUT_MAX_BYTES = 2 * 1024**2
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
_GDB_FRAME = re.compile(r"^#\d+\s.*")
_COREDUMPCTL_FRAME = re.compile(r"^\s+#\d+\s+0x[0-9a-f]+\s.*", re.MULTILINE)
_STORAGE = re.compile(r"^\s+Storage: (?P<path>/\S+)(?: \((?P<state>[^)]*)\))?", re.MULTILINE)
_COREDUMP_MESSAGE = "fc2e22bc6ee647b6b90729ab34a250b1"
"""SD_MESSAGE_COREDUMP of sd-messages.h."""
_LOW = ("nice", "-n", "19")


@dataclass(frozen=True, slots=True)
class Death:
    """Who died of what. `cwd`: where a core file without a folder of its own lands."""

    pid: int
    program: str
    signal: str
    time_s: float
    cwd: str


@dataclass(frozen=True, slots=True)
class Dump:
    """What was found. `frames`: the innermost first; empty where nothing can read it."""

    path: str
    frames: tuple[str, ...]


async def dump_of(death: Death) -> Dump | None:
    """None where there is none. Blocks nobody; at most twice DEADLINE_S."""
    if death.signal not in DUMPING_SIGNALS:
        return None
    pattern = _pattern()
    if pattern.startswith("|"):
        return await _from_journal(death) if shutil.which("coredumpctl") else None
    file = core_file(pattern, death)
    return Dump(str(file), await _frames(death.program, file)) if file is not None else None


def core_file(pattern: str, death: Death) -> Path | None:
    """The file that the kernel has written by this pattern, and not an older one of another process."""
    name = pattern.replace("%p", str(death.pid)).replace("%%", "%")
    folder, _, last = name.rpartition("/")
    place = Path(death.cwd, folder) if not folder.startswith("/") else Path(folder)
    if "%" in str(place):
        return None  # a folder by host, user or time: not ours to guess
    parts = re.split(r"%\w", last)
    candidates = [file for file in _files(place) if _fits(file.name, parts, death.pid)]
    fresh = [file for file in candidates if _written_s(file) >= death.time_s - DEADLINE_S]
    return max(fresh, key=_written_s, default=None)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [file for file in folder.iterdir() if file.is_file()]
    return []


def _fits(name: str, parts: Sequence[str], pid: int) -> bool:
    """The pattern's own words in their order, and kernel.core_uses_pid's number or nothing behind them."""
    middle = ".*".join(re.escape(part) for part in parts)
    return re.fullmatch(rf"{middle}(?:\.{pid})?", name) is not None


def _written_s(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _pattern() -> str:
    with contextlib.suppress(OSError):
        return CORE_PATTERN.read_text().strip()
    return ""


async def _frames(program: str, core: Path) -> tuple[str, ...]:
    if shutil.which("gdb") is None:
        return ()
    said = await run((*_LOW, "gdb", "-nx", "-q", "-batch", "-ex", f"bt {FRAMES}", program, str(core)), DEADLINE_S)
    return tuple(line.strip() for line in said.splitlines() if _GDB_FRAME.match(line))[:FRAMES]


async def _from_journal(death: Death) -> Dump | None:
    """systemd-coredump has read the stack already; its report is what `coredumpctl info` prints."""
    since = f"@{int(death.time_s - DEADLINE_S)}"
    said = await run((*_LOW, "coredumpctl", "--no-pager", "--since", since, "info", str(death.pid)), DEADLINE_S)
    if not said.strip():
        return None
    storage = _STORAGE.search(said)
    path = storage["path"] if storage is not None and storage["state"] != "missing" else ""
    return Dump(path, tuple(match.strip() for match in _COREDUMPCTL_FRAME.findall(said))[:FRAMES])


async def dumps_of(program: str, since_s: float) -> list[CoreDump]:
    """The dumps of this program that systemd-coredump has kept a record of since then; empty where it is not there or not ours to read."""
    if not _pattern().startswith("|") or shutil.which("journalctl") is None:
        return []
    query = ("journalctl", "--no-pager", "--quiet", "-o", "json", "--since", f"@{int(since_s)}", f"MESSAGE_ID={_COREDUMP_MESSAGE}")
    return [dump for line in (await run((*_LOW, *query), DEADLINE_S)).splitlines() if (dump := _recorded(line, program)) is not None]


def _recorded(line: str, program: str) -> CoreDump | None:
    """A record of the journal, if it is about this program."""
    try:
        record = json.loads(line)
        if not str(record["COREDUMP_CMDLINE"]).startswith(program):
            return None
        signal, file = str(record.get("COREDUMP_SIGNAL_NAME", "")), str(record.get("COREDUMP_FILENAME", ""))
        return CoreDump(int(record["COREDUMP_TIMESTAMP"]) / 1e6, Path(program).name, signal, file)
    except (ValueError, KeyError, TypeError):
        return None


async def run(argv: Sequence[str], deadline_s: float) -> str:
    """What a program printed; empty where it cannot be run, took too long, or failed."""
    null = asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=null, stdout=asyncio.subprocess.PIPE, stderr=null, env={**os.environ, "DEBUGINFOD_URLS": ""}
        )
    except OSError:
        return ""
    assert child.stdout is not None
    said = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            while data := await child.stdout.read(65536):
                said += data[: OUTPUT_MAX_BYTES - len(said)]
            await child.wait()
    except TimeoutError:
        said.clear()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return said.decode(errors="replace") if child.returncode == 0 else ""
