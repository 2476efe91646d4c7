"""`appliancectl logs`: what engine, gateway and supervisor said, in one order, the fatal lines marked."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click

from appliance.cli.place import Place
from appliance.cli.printing import bad, faint, say, say_json, uncertain
from appliance.cli.verbs import Verb
from appliance.core.errors import ApplianceError, NotPermitted
from appliance.core.printable import printable

SUPERVISOR_UNIT, GATEWAY_UNIT = "llm-appliance.service", "llm-appliance-gateway.service"
PARTS = ("engine", "gateway", "supervisor")
_TOLD_WITH = {"spare": "engine", "systemd": "supervisor"}
"""Who else speaks in the units, and with whose lines that is shown: the next engine, and who starts applianced."""
READERS = ("systemd-journal", "adm")
"""Groups that may read what services said."""
SPARE = 10
"""So many times the lines that are wanted are read, since some are of the others."""
_WARNING, _ERROR = 4, 3
_NUMBERED = {"engine": "APPLIANCE_ENGINE", "spare": "APPLIANCE_SPARE"}
"""Fields of lines that are not applianced's own words: which life, which process."""
Fatal = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal.

    Attributes:
        who: engine, spare, gateway, supervisor, or systemd about them.
        generation: of the engine's life that said it, where one did; a spare's process number.
        priority: syslog's number; smaller is worse.
        fatal: the pattern by which diagnosis takes it for the end of an engine; empty where it does not.
        card: with an engine on each card, that of which it is said.
    """

    time_s: float
    who: str
    generation: str
    priority: int
    text: str
    fatal: str = ""
    card: str = ""


@click.command(cls=Verb)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes; Ctrl-C ends it.")
@click.option("-n", "--lines", type=click.IntRange(1, 1_000_000), default=200, show_default=True, help="How many of the last lines.")
@click.option("--since", metavar="TIME", help="From then on, in the words of journalctl: 10min ago, today, 2026-11-30 14:05.")
@click.option("--engine", is_flag=True, help="What the engine said.")
@click.option("--gateway", is_flag=True, help="What the gateway said.")
@click.option("--supervisor", is_flag=True, help="What applianced said.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs: a line each.")
@click.pass_obj
def logs(place: Place, /, follow: bool, lines: int, since: str | None, as_json: bool, **chosen: bool) -> None:
    """What engine, gateway and applianced said, in one order.

    From systemd's journal. Lines by which an engine's end is known are marked with the pattern that knows them: `appliancectl diagnose`
    says what follows from them. Without --engine, --gateway or --supervisor all three are shown.

    \b
    Example:
      appliancectl logs -f
      appliancectl logs --engine --since "10min ago"
      appliancectl logs --json | jq -r 'select(.fatal != "") | .text'
    """
    wanted = frozenset(part for part in PARTS if chosen[part]) or frozenset(PARTS)
    fatal = _fatal_of(place)
    with contextlib.suppress(KeyboardInterrupt):
        last, cursor = deque[Entry](maxlen=None if since else lines), ""
        for record in _journal(_arguments(since, lines * SPARE)):
            cursor = str(record.get("__CURSOR", ""))
            if part_of(entry := entry_of(record, fatal)) in wanted:
                last.append(entry)
        if not last:
            _nothing(follow=follow)
        for entry in last:
            _show(entry, as_json)
        if follow:
            for record in _journal(_arguments(None, 0, "--follow", *([f"--after-cursor={cursor}"] if cursor else []))):
                if part_of(entry := entry_of(record, fatal)) in wanted:
                    _show(entry, as_json)


def _nothing(*, follow: bool) -> None:
    """Of those that are wanted. Raises NotPermitted where it is the journal that is closed: `journalctl --quiet` says nothing of that."""
    if not _may_read():
        who = _user()
        hint = f"as root: usermod -aG {READERS[0]} {who}, and log in again; or run this as root"
        raise NotPermitted(
            f"the user {who} may not read what services write to the journal (groups {' and '.join(READERS)} may)", hint=hint
        )
    if not follow:
        raise ApplianceError("the journal has nothing of them", hint="`appliancectl run` prints its log to its own terminal")


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _may_read() -> bool:
    if os.geteuid() == 0:
        return True
    mine = {os.getegid(), *os.getgroups()}
    return any(group.gr_gid in mine for group in grp.getgrall() if group.gr_name in READERS)


def _show(entry: Entry, as_json: bool) -> None:
    if as_json:
        say_json(asdict(entry), on_one_line=True)
    else:
        say(line_of(entry))


def entry_of(record: Mapping[str, Any], fatal: Fatal) -> Entry:
    """A record of `journalctl -o json`."""
    said = record.get("MESSAGE")
    # Bytes that are no UTF-8 come as a list of numbers, and a line that is too long as nothing.
    text = bytes(said).decode(errors="replace") if isinstance(said, list) else str(said or "")
    who = _speaker(record)
    generation = str(record.get(_NUMBERED.get(who, ""), ""))
    pattern = fatal(text) if who == "engine" else None
    time_s = int(record.get("__REALTIME_TIMESTAMP", 0)) / 1e6
    words, card = printable(click.unstyle(text), keep="\t\n"), str(record.get("APPLIANCE_CARD", ""))
    return Entry(time_s, who, generation, int(record.get("PRIORITY", 6)), words, pattern or "", card)


def part_of(entry: Entry) -> str:
    """The one of PARTS that it is shown with."""
    return _TOLD_WITH.get(entry.who, entry.who)


def _speaker(record: Mapping[str, Any]) -> str:
    """Lines of a unit come from it and carry fields of ours; what systemd says about it comes from elsewhere."""
    unit = record.get("_SYSTEMD_UNIT", "" if "UNIT" in record else SUPERVISOR_UNIT)
    if unit != SUPERVISOR_UNIT:
        return "gateway" if unit == GATEWAY_UNIT else "systemd"
    return next((who for who, field in _NUMBERED.items() if field in record), "supervisor")


def line_of(entry: Entry) -> str:
    """For people."""
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.time_s))
    who = entry.who if entry.who == "spare" else f"{entry.who} {entry.generation}".strip()
    if entry.card and entry.who in _NUMBERED:  # applianced's own words have it in them
        who = f"{who} on {entry.card}"
    mark = bad(f"fatal ({entry.fatal}): ") if entry.fatal else bad("error: ") if entry.priority <= _ERROR else ""
    if not mark and entry.priority == _WARNING:
        mark = uncertain("warning: ")
    return f"{faint(f'{clock} {who:<11}')}  {mark}{entry.text}"


def _arguments(since: str | None, lines: int, *more: str) -> list[str]:
    units = (f"--unit={SUPERVISOR_UNIT}", f"--unit={GATEWAY_UNIT}")
    window = () if "--follow" in more and len(more) > 1 else (f"--since={since}",) if since is not None else (f"--lines={lines}",)
    return ["journalctl", "--output=json", "--no-pager", "--quiet", *units, *window, *more]


def _journal(command: list[str]) -> Iterator[Mapping[str, Any]]:
    """The records, as they come. Raises ApplianceError where journalctl cannot be run or says no."""
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ApplianceError(
                f"journalctl cannot be run ({error.strerror})",
                hint="without systemd, `appliancectl run` prints its log to its own terminal",
            ) from None
        assert process.stdout is not None
        try:
            yield from _records(process.stdout)
            if process.wait() != 0:
                complaints.seek(0)
                raise _refused(complaints.read(4096).decode(errors="replace"))
        finally:
            process.kill()
            process.wait()


def _records(stream: IO[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in stream:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _refused(said: str) -> ApplianceError:
    words = " ".join(said.split()) or "no reason"
    if "permission" in words.lower():
        return NotPermitted(f"journalctl: {words}", hint="run as root or join the group systemd-journal")
    return ApplianceError(f"journalctl: {words}", hint="is --since a time as journalctl takes it?")


def _fatal_of(place: Place) -> Fatal:
    """With the operator's own patterns, where the configuration can be read."""
    from appliance.diagnosis import is_fatal_line, with_operator_patterns

    try:
        folder = place.load().config.diagnosis.patterns_dir
    except ApplianceError:
        return is_fatal_line
    return with_operator_patterns(Path(folder) if folder else None)[0].fatal
