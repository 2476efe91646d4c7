"""What to do about a cause: sentences and settings from `remedies.toml`, with the numbers of the case filled in."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.core.errors import ApplianceError
from appliance.core.units import format_bytes, format_duration
from appliance.diagnosis.case import Case
from appliance.diagnosis.events import Event

REMEDIES_FILE = Path(__file__).parent / "remedies.toml"
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Advice:
    """The words about one verdict."""

    sentence: str
    remedies: tuple[str, ...]
    safer_config: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class _Row:
    sentence: str
    with_numbers: str
    remedies: tuple[str, ...]
    safer_config: tuple[tuple[str, tuple[str, ...]], ...]
    """For each setting its wordings, the one with the most numbers first."""
    action: ActionKind


def advise(root: Event, case: Case) -> Advice:
    """Sentence, remedies and settings for this root; slots without a number fall back to the plain wording."""
    if root.cause is None:
        raise AssertionError("advice is asked for a root without a cause; please report this")
    row = _rows()[root.cause]
    numbers = _numbers(root)
    shown = {name: _shown(name, value) for name, value in numbers.items()} | {
        name: str(value) for name, value in root.fields.items() if isinstance(value, str)
    }
    shown |= {f"{name}_plain": f"{value:.0f}" for name, value in numbers.items()} | _settings(case)
    sentence = _filled(row.with_numbers, shown) or _filled(row.sentence, shown) or row.sentence
    remedies = tuple(text for text in (_filled(remedy, shown) for remedy in row.remedies) if text)
    settings = tuple(
        (key, text) for key, values in row.safer_config if (text := next(filter(None, (_filled(value, shown) for value in values)), ""))
    )
    return Advice(f"{sentence.rstrip('.')}.", remedies, settings, tuple(sorted(numbers.items())))


def action_for(cause: Cause) -> ActionKind:
    """What the appliance would do about this cause at the first time, by the table."""
    return ActionKind.RESTART_SAME if cause is Cause.UNKNOWN else _rows()[cause].action


def sentence_of(cause: Cause) -> str:
    """The plain sentence of a cause, without numbers."""
    return cause.definition if cause is Cause.UNKNOWN else _SLOT.sub("a number", _rows()[cause].sentence)


def remedies_of(cause: Cause) -> tuple[str, ...]:
    """What to do about a cause, without the numbers of a case; wordings that are nothing without them are left out."""
    rows = () if cause is Cause.UNKNOWN else _rows()[cause].remedies
    return tuple(remedy for remedy in rows if not _SLOT.search(remedy))


def _numbers(root: Event) -> dict[str, float]:
    numbers = {name: value for name, value in root.fields.items() if isinstance(value, float) and math.isfinite(value)}
    if root.count > 1:
        numbers["seen_count"] = float(root.count)
    return numbers


def _settings(case: Case) -> dict[str, str]:
    """What the engine said of its own setting when it started, and the next step down of each."""
    said = {name: value for event in case.named("starting", "settings") for name, value in _numbers(event).items()}
    shown: dict[str, str] = {}
    if 0 < (fraction := said.get("mem_fraction", 0.0)) <= 1:
        shown |= {"fraction": f"{fraction:g}", "fraction_lower": f"{fraction - 0.02:g}"}
    for name, divisor in (("context", 0), ("chunk", 2), ("running", 2)):
        if (value := said.get(f"{name}_tokens", said.get(f"{name}_count", 0.0))) > 1:
            shown |= {name: f"{value:.0f}"} | ({f"{name}_half": f"{value // divisor:.0f}"} if divisor else {})
    return shown


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(round(value))
    if name.endswith("_s"):
        return format_duration(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _filled(template: str, shown: Mapping[str, str]) -> str:
    """The template with its slots filled, or "" when one has no value."""
    names = _SLOT.findall(template)
    if any(not shown.get(name) for name in names):
        return ""
    return _SLOT.sub(lambda match: shown[match[1]], template)


@functools.cache
def _rows() -> dict[Cause, _Row]:
    document = tomllib.loads(REMEDIES_FILE.read_text(encoding="utf-8"))
    rows = {Cause.of(label): _row(label, table) for label, table in document.items()}
    missing = [cause.label for cause in Cause if cause not in rows and cause is not Cause.UNKNOWN]
    if missing:
        raise ApplianceError(f"{REMEDIES_FILE.name} has no row for {missing}", hint="every label needs one")
    return rows


def _row(label: str, table: Mapping[str, object]) -> _Row:
    remedies, settings = table.get("remedies", []), table.get("safer_config", {})
    if not isinstance(remedies, list) or not isinstance(settings, dict):
        raise ApplianceError(f"{REMEDIES_FILE.name}: {label}: `remedies` is a list, `safer_config` a table")
    return _Row(
        sentence=str(table["sentence"]),
        with_numbers=str(table.get("with_numbers", "")),
        remedies=tuple(map(str, remedies)),
        safer_config=tuple(
            (str(key), tuple(map(str, value)) if isinstance(value, list) else (str(value),)) for key, value in settings.items()
        ),
        action=ActionKind(str(table["action"])),
    )
