"""A child's log line as a person reads it. applianced and the gateway write for a journal when nobody is at their terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import click

from appliance.core.printable import printable

NAMES_WIDTH = len("applianced")
_ENGINE_STAMP = re.compile(r"^\[[0-9-]+ [0-9:.,]+\] ?")
_NOT_FIELDS = frozenset({"event", "level", "timestamp", "engine", "logger", "state", "before"})
_LEVEL = re.compile(r"^(?:\[[^\]]*\] )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b ?")
_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "exception": "red"}


def render(name: str, line: str, clock: str) -> str:
    """`clock` is the time of day to print; colours are for the output to take out where they are not wanted."""
    record = _record(line)
    if record is None:
        match = _LEVEL.match(line)
        return _shown(clock, name, match[1].lower() if match else "info", line[match.end() :] if match else line)
    level, text = str(record.get("level", "info")), str(record["event"])
    if "engine" in record:
        text = _ENGINE_STAMP.sub("", text)
        match = _LEVEL.match(text)
        where = f"card {record['card']}: " if "card" in record else ""
        return _shown(clock, "engine", match[1].lower() if match else level, where + (text[match.end() :] if match else text))
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _NOT_FIELDS)
    return _shown(clock, name, level, text, fields)


def plain(line: str) -> str:
    """The same in a sentence: the text alone, with the error that it carries."""
    record = _record(line)
    if record is None:
        match = _LEVEL.match(line)
        return _clean(line[match.end() :] if match else line)
    return _clean(": ".join(str(record[key]) for key in ("event", "error") if record.get(key)))


def _record(line: str) -> Mapping[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _clean(text: str) -> str:
    """An engine may print what its clients have sent, and its own colours."""
    return printable(click.unstyle(text), keep="\t")


def _shown(clock: str, name: str, level: str, text: str, fields: str = "") -> str:
    mark = "" if level in ("info", "debug") else click.style(f"{level}: ", fg=_COLOURS.get(level), bold=True)
    tail = click.style(f"  {_clean(fields)}", dim=True) if fields else ""
    return f"{click.style(f'{clock} {name:<{NAMES_WIDTH}}', dim=True)}  {mark}{_clean(text)}{tail}"
