"""Times as logs write them. A time without a zone is taken as UTC and marked, for such clocks may differ by hours."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, replace

_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name.lower(): index for index, name in enumerate(_MONTH_NAMES, 1)}
_OTHER_MONTHS = (
    "janv ene gen sty янв", "févr fev fév lut фев", "mär mars mrt мар", "avril abr kwi апр", "mai mag mei maj май мая", "juin giu cze июн",
    "juil lug lip июл", "août ago sie авг", "sept set wrz сен", "okt ott out paź окт", "lis ноя", "déc dez dic gru des дек",
)  # fmt: skip
"""journalctl and syslog write the month in the machine's language: German, French, Spanish, Italian, Portuguese, Dutch, Polish, the
Scandinavian ones and Russian, as far as they differ from English; Chinese and Japanese write its number."""
_MONTHS |= {name: index for index, names in enumerate(_OTHER_MONTHS, 1) for name in names.split()}
_MONTHS |= {f"{index}月": index for index in range(1, 13)}
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)(?:[T ]| - )(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?")
_SYSLOG = re.compile(r"(?<!\w)([^\W\d_]{3,5}|\d{1,2}月)\.? +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?: (\d{4}))?")
_MONTH_DAY = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_GLOG = re.compile(r"\b[EWIF](\d\d?)?(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,9})")
HEAD = 120
"""A line's own time stands within so many characters."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A time, and what the line did not say of it."""

    time_s: float
    zone_unknown: bool
    year_unknown: bool = False


def stamp_in(text: str, year: int) -> Stamp | None:
    """The time in a line's head, whatever program wrote it. `year` fills in for those that leave it out."""
    head = text[:HEAD]
    iso = _ISO.search(head)
    if iso is not None:
        return iso_stamp(iso)
    syslog = _SYSLOG.search(head)
    if syslog is not None and (month := _MONTHS.get(syslog[1].lower())) is not None:
        clock = (int(syslog[3]), int(syslog[4]), int(syslog[5]))
        stamp = _build(int(syslog[7] or year), month, int(syslog[2]), clock, syslog[6], None)
        return stamp if syslog[7] else _without_year(stamp)
    short = _MONTH_DAY.search(head)
    if short is not None:
        return _without_year(_build(year, int(short[1]), int(short[2]), (int(short[3]), int(short[4]), int(short[5])), None, None))
    glog = _GLOG.search(head)
    if glog is not None and glog[1]:
        return _without_year(_build(year, int(glog[1]), int(glog[2]), (int(glog[3]), int(glog[4]), int(glog[5])), glog[6], None))
    return None


def _without_year(stamp: Stamp | None) -> Stamp | None:
    return None if stamp is None else replace(stamp, year_unknown=True)


def iso_stamp(match: re.Match[str]) -> Stamp | None:
    """The time of a match of the ISO form."""
    clock = (int(match[4]), int(match[5]), int(match[6]))
    return _build(int(match[1]), int(match[2]), int(match[3]), clock, match[7], match[8])


def parse_iso(text: str) -> Stamp | None:
    """The time of an ISO text such as 2026-08-16T09:41:40.123Z."""
    match = _ISO.match(text)
    return None if match is None else iso_stamp(match)


def _build(year: int, month: int, day: int, clock: tuple[int, int, int], fraction: str | None, zone: str | None) -> Stamp | None:
    try:
        moment = datetime.datetime(year, month, day, *clock, tzinfo=datetime.UTC)
    except ValueError:
        return None
    time_s = moment.timestamp() - _offset_s(zone)
    return Stamp(time_s + (float(f"0.{fraction}") if fraction else 0.0), zone is None)


def _offset_s(zone: str | None) -> float:
    if zone is None or zone in ("Z", "UTC"):
        return 0.0
    sign = -1 if zone[0] == "-" else 1
    digits = zone[1:].replace(":", "")
    return sign * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
