"""How appliancectl looks: JSON for programs, words for people, colours only where a person sees them."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

from appliance.core.units import format_duration

WIDTH = 100
_MOVES_A_TERMINAL = re.compile(r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls of eight bits and of the reading direction, which JSON lets stand; it escapes the others itself."""


def colour() -> bool | None:
    """False where colours are not wanted (https://no-color.org, TERM=dumb); None lets the terminal decide."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def coloured() -> bool:
    """Whether stdout shows colours: for what is not printed through `say`."""
    return sys.stdout.isatty() and colour() is not False


def say(text: str = "") -> None:
    """A line for people."""
    click.echo(text, color=colour())


def warn(text: str) -> None:
    """A line about something that is wrong and stops nothing; not among the output."""
    click.echo(f"warning: {text}", err=True, color=colour())


def say_json(value: Any, *, on_one_line: bool = False) -> None:
    """Data for programs: one document, keys in their order. Letters of all languages stay; what would move a terminal is escaped."""
    text = json.dumps(value, indent=None if on_one_line else 2, ensure_ascii=False)
    click.echo(_MOVES_A_TERMINAL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def bold(text: str) -> str:
    """Headings and what matters most."""
    return click.style(text, bold=True)


def faint(text: str) -> str:
    """Sources and places."""
    return click.style(text, dim=True)


def good(text: str) -> str:
    """It works."""
    return click.style(text, fg="green", bold=True)


def bad(text: str) -> str:
    """It does not."""
    return click.style(text, fg="red", bold=True)


def uncertain(text: str) -> str:
    """On its way, or not known."""
    return click.style(text, fg="yellow", bold=True)


def fields(rows: Iterable[tuple[str, str]]) -> None:
    """Name and value, values aligned and wrapped under themselves; empty values are left out."""
    shown = [(name, value) for name, value in rows if value]
    margin = max((len(name) for name, _ in shown), default=0) + 4
    for name, value in shown:
        first, *rest = wrapped(value, WIDTH - margin)
        say(f"  {faint(name.ljust(margin - 2))}{first}")
        for line in rest:
            say(" " * margin + line)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one runs on."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    for number, row in enumerate((head, *rows)):
        line = "  ".join([cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)] + [row[-1]])
        say(faint(line) if number == 0 else line)


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width`; long words (paths, log lines) stay whole so that they can be copied."""
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def moment(time_s: float) -> str:
    """Local wall-clock time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def ago(time_s: float) -> str:
    """ "3 min 20 s ago"."""
    return f"{format_duration(max(0.0, time.time() - time_s))} ago"
