"""Which boot a line is of. A log of weeks holds the faults of boots that are over; a card that was lost in one of them is not lost now.

A boot begins at journalctl's separator, at the kernel's banner or where the journal's boot id changes; the cards begin anew too where
the driver is loaded again after a fault. What the firmware kept of the boot before (`BERT`) is of that one. Which boot was the engine's
is told by the place of its lines, by their boot id or by their clock.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.causality import ZONE_UNKNOWN_S, distance_s
from appliance.diagnosis.events import Event
from appliance.diagnosis.pattern import TEXT_SOURCES, Kind
from appliance.diagnosis.timeline import ENGINE_SOURCES

_SEPARATOR = re.compile(r"-- (?:Boot [0-9a-f]{8,32}|Reboot) --")
_BANNER = "Linux version "
_DRIVER = "NVRM: loading NVIDIA UNIX"
_FAULT = re.compile(r"NVRM: .{0,20}Xid \(|allen off the bus|RmInitAdapter failed|API mismatch")
_KEPT = "BERT: Error records from previous boot"
_KEPT_LINE = "[Hardware Error]"
BANNER_LINES = 3
"""journalctl's separator and the kernel's banner stand so near each other that they are one beginning."""
SLACK_S = 2.0
_JUDGED = (Kind.CAUSE, Kind.CONSEQUENCE, Kind.BENIGN)
_ENDS = {"boot": 1, "shutdown_record": 0}
"""Events that tell of a boot's end, and how many boots later they stand."""
ANOTHER = "it belongs to another boot, or to the driver as it was loaded before"
PERHAPS_ANOTHER = "it belongs to a boot that ended before the last one, and the engine's log has no clock to tell which was its own"


@dataclass(slots=True)
class _File:
    """The lines of one file, by their boots' numbers."""

    numbers: dict[int, int] = field(default_factory=dict)
    """Position among all evidence → number of the boot."""
    begins: dict[int, Evidence] = field(default_factory=dict)
    """The first line of a boot that has a clock."""
    ended: dict[int, Evidence | None] = field(default_factory=dict)
    """Of boots whose end is on record the line that tells, if it has a clock."""
    loads: set[int] = field(default_factory=set)
    """Those that begin with the driver, loaded anew."""
    ids: dict[str, int] = field(default_factory=dict)

    @property
    def boots(self) -> list[int]:
        return sorted(set(self.numbers.values()))

    def note_ends(self, events: Sequence[Event]) -> None:
        """From what tells of a shutdown, and where the driver was loaded anew; of the last boot only another would tell the end."""
        self.ended |= {number - 1: self.begins.get(number) for number in self.loads}
        for event in events:
            number = self.numbers.get(event.order) if event.name == "shutdown_record" else None
            if number is not None and number != self.boots[-1]:
                self.ended[number] = event.evidence


def set_aside(life: Sequence[Event], events: Sequence[Event], items: Sequence[Evidence]) -> tuple[list[Event], tuple[Event, ...]]:
    """What is left of the engine life to be judged, without the events of boots that were not the engine's; and those, each with a note.

    They are unsure where no clock tells. Of all events the first of the engine's tells since when it was seen.
    """
    files = [file for file in _files(items) if len(file.boots) > 1]
    engine = [event for event in life if event.source in ENGINE_SOURCES]
    if not files or not engine:
        return list(life), ()
    seen_first = next(event for event in events if event.source in ENGINE_SOURCES)
    aside: dict[int, Event] = {}
    for file in files:
        file.note_ends(events)
        own = _own(file, engine)
        others = _of_others(file, own, life) if own is not None else _of_boots_that_ended(file, life)
        aside |= {id(event): _noted(event, is_sure=own is not None) for event in others}
        if own is not None:
            since = _own(file, [seen_first])
            aside |= {
                id(event): _noted(event, is_sure=True) for event in _resets_of_others(file, own if since is None else since, own, life)
            }
    return [event for event in life if id(event) not in aside], tuple(aside.values())


def _noted(event: Event, *, is_sure: bool) -> Event:
    return replace(event, sure=is_sure, note=ANOTHER if is_sure else PERHAPS_ANOTHER)


def _of_others(file: _File, own: int, events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if event.source not in ENGINE_SOURCES and event.kind in _JUDGED and file.numbers.get(event.order, own) != own:
            yield event


def _of_boots_that_ended(file: _File, events: Sequence[Event]) -> Iterator[Event]:
    """In order, and were followed by another: nobody has to ask whether the engine was lost with them."""
    if sum(number == file.boots[-1] for number in file.numbers.values()) > 1:  # more than its separator
        yield from (event for event in events if event.is_suspect and file.numbers.get(event.order) in file.ended)


def _resets_of_others(file: _File, since: int, own: int, events: Sequence[Event]) -> Iterator[Event]:
    """Ends of boots that the engine was not up in, and what tells that they were in order."""
    for event in events:
        if event.name in _ENDS and event.order in file.numbers and not since <= file.numbers[event.order] - _ENDS[event.name] <= own:
            yield event


def _own(file: _File, engine: Sequence[Event]) -> int | None:
    """The engine's boot, by the place of its last line, its boot id or its clock; None where nothing tells."""
    last = engine[-1]
    if last.order in file.numbers:
        return file.numbers[last.order]
    if last.evidence.boot_id in file.ids:
        return file.ids[str(last.evidence.boot_id)]
    timed = next((event.evidence for event in reversed(engine) if event.evidence.time_s is not None), None)
    return None if timed is None else _by_clock(file, timed)


def _by_clock(file: _File, line: Evidence) -> int | None:
    """The only boot that may hold the line; None where several may, or clocks run backwards."""
    begins = [file.begins[number] for number in file.boots if number in file.begins]
    steps = [distance_s(later, earlier) for earlier, later in itertools.pairwise(begins)]
    if not begins or any(step_s is None or step_s < 0 for step_s in steps):
        return None
    before_all_s = distance_s(line, begins[0])
    if before_all_s is not None and before_all_s < -_slack_s(line, begins[0]):
        return file.boots[0]
    may = [number for number in file.boots if _may_hold(file, number, line)]
    return may[0] if len(may) == 1 else None


def _may_hold(file: _File, number: int, line: Evidence) -> bool:
    """Begun by then, and neither ended in order nor followed by another."""
    begins, later = file.begins.get(number), [file.begins[other] for other in file.boots if other > number and other in file.begins]
    if begins is not None and (distance_s(line, begins) or 0.0) < -_slack_s(line, begins):
        return False
    ended = file.ended.get(number)
    if ended is not None and ended.time_s is not None:
        return (distance_s(line, ended) or 0.0) <= _slack_s(line, ended)
    if not later:
        return True
    slack_s = _slack_s(line, later[0])
    return (distance_s(line, later[0]) or 0.0) < (slack_s if slack_s > SLACK_S else -slack_s)


def _slack_s(one: Evidence, other: Evidence) -> float:
    return SLACK_S if bool(one.data.get("zone_unknown")) is bool(other.data.get("zone_unknown")) else ZONE_UNKNOWN_S


def _files(items: Sequence[Evidence]) -> Iterator[_File]:
    """The files that the evidence was read from, divided: where line numbers begin anew, another file does."""
    lines: list[tuple[int, Evidence]] = []
    for order, item in enumerate(items):
        if item.source not in TEXT_SOURCES:
            continue
        if lines and item.line and item.line <= lines[-1][1].line:
            yield _divided(lines)
            lines = []
        lines.append((order, item))
    yield _divided(lines)


def _divided(lines: Sequence[tuple[int, Evidence]]) -> _File:
    file, number, since, kept, failed = _File(), 0, BANNER_LINES, False, False
    boot_id: str | None = None
    for order, item in lines:
        is_load = failed and item.text.startswith(_DRIVER)
        if is_load or _begins(item, since, boot_id):
            number, since, failed = number + 1, 0, False
            file.loads |= {number} if is_load else set()
        since += 1
        boot_id = item.boot_id or boot_id
        failed = failed or (item.source is Source.KERNEL_LOG and _FAULT.search(item.text) is not None)
        kept = item.text.startswith(_KEPT) or (kept and _KEPT_LINE in item.text)
        _add(file, order, item, number - kept)
    return file


def _begins(item: Evidence, since: int, boot_id: str | None) -> bool:
    """Whether a boot begins with this line; so many stand between the last beginning and it."""
    if item.boot_id is not None and boot_id is not None:
        return item.boot_id != boot_id
    if _SEPARATOR.match(item.text) is not None:
        return True
    return item.source is Source.KERNEL_LOG and item.text.startswith(_BANNER) and since >= BANNER_LINES


def _add(file: _File, order: int, item: Evidence, number: int) -> None:
    file.numbers[order] = number
    if item.time_s is not None and not (item.text.startswith(_KEPT) or _KEPT_LINE in item.text):
        file.begins.setdefault(number, item)
    if item.boot_id is not None:
        file.ids.setdefault(item.boot_id, number)
