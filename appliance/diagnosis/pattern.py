"""A pattern: one sentence that one program prints, what it means, and the samples that prove it.

Patterns are data (`patterns/*.toml`); this module gives them a type and refuses the ones that cannot be right.
"""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.core.causes import Cause
from appliance.core.errors import ApplianceError
from appliance.core.evidence import Source
from appliance.core.units import parse_bytes


class PatternError(ApplianceError):
    """A pattern file is wrong; the message names file, pattern and field."""


class Kind(enum.Enum):
    """What a matching line can be in the argument."""

    CAUSE = "cause"
    """It may be the root."""
    CONSEQUENCE = "consequence"
    """It never is: a wrapper, an echo, the end of a process that something else brought down."""
    SYMPTOM = "symptom"
    """Never the root by itself, but rules may make one of it (a repeated wait, a refused health check)."""
    MILESTONE = "milestone"
    """Where the engine stood: loading, ready, prefill, decode, stopping."""
    BENIGN = "benign"
    """It explains an `ok_*` verdict and nothing else."""


TIERS = {
    0: "platform or device",
    1: "GPU software fault",
    2: "refusal, allocation or configuration",
    3: "stop request",
    4: "time-out",
    5: "service manager, SIGKILL",
    6: "weak hint",
    7: "benign",
}
"""The lower tier is the deeper cause."""

TEXT_SOURCES = (Source.ENGINE_LOG, Source.KERNEL_LOG, Source.SYSTEMD, Source.NVIDIA_SMI, Source.STACK, Source.CORE_DUMP)

_REQUIRED = ("id", "kind", "event", "literals", "regex", "source", "samples")
_KNOWN = frozenset({*_REQUIRED, "cause", "tier", "rank", "engines", "versions", "sources", "fatal", "frequent"})
_LAZY_HEAD = re.compile(r"^\^?\.[*+]")
MIN_LITERAL = 3


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row of the catalogue.

    Attributes:
        pattern_id: `program.what`, unique.
        event: a word of the closed vocabulary (`events.EVENTS`): a cause's label, or something rules decide on.
        cause: the label where the event needs no rule.
        tier, rank: depth; the lower pair is the deeper cause.
        literals: one of them stands in every matching line (the cheap test before the regular expression).
        regex: searched, never anchored on what a wrapper may put before it.
        origin: where the sentence is printed: program, file.
        fatal: this line alone means that the engine is gone or going.
        frequent: the scan of a large log does not stop at it: healthy engines print it all the time, or it only counts
            near a line that the scan stops at.
    """

    pattern_id: str
    kind: Kind
    event: str
    cause: Cause | None
    tier: int
    rank: int
    engines: tuple[str, ...]
    versions: str
    sources: frozenset[Source]
    literals: tuple[str, ...]
    regex: re.Pattern[str]
    origin: str
    samples: tuple[str, ...]
    fatal: bool = False
    frequent: bool = False

    def search(self, line: str) -> re.Match[str] | None:
        """The match in this line, if any; the literals are tried first."""
        for literal in self.literals:
            if literal in line:
                return self.regex.search(line)
        return None


Value = str | float


def fields_of(match: re.Match[str]) -> dict[str, Value]:
    """The named groups, converted by the unit in their name (`_bytes`, `_s`, `_ms`, `_tokens`); unreadable ones stay text.

    `x_alt` is `x` in another wording of the same sentence.
    """
    fields: dict[str, Value] = {}
    for name, text in match.groupdict().items():
        if text is not None:
            fields.update([_converted(name.removesuffix("_alt"), text)])
    return fields


def _converted(name: str, text: str) -> tuple[str, Value]:
    try:
        if name.endswith("_bytes"):
            return name, float(parse_bytes(text))
        if name.endswith("_gib"):
            return name.removesuffix("_gib") + "_bytes", float(text) * 1024**3
        if name.endswith("_mib"):
            return name.removesuffix("_mib") + "_bytes", float(text) * 1024**2
        if name.endswith("_ms"):
            return name.removesuffix("_ms") + "_s", float(text) / 1000
        if name.endswith(("_s", "_tokens", "_count", "_fraction")):
            return name, float(text.replace(",", ""))
    except ValueError:
        pass
    return name, text


def load_patterns(path: Path) -> tuple[Pattern, ...]:
    """The patterns of one TOML file: `[defaults]` and `[[pattern]]` tables.

    Raises:
        PatternError: the file is no TOML, or a pattern is incomplete, unknown or greedy.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PatternError(f"{path}: cannot be read as a pattern file: {error}", hint="write TOML with [[pattern]] tables") from error
    defaults = document.get("defaults", {})
    rows = document.get("pattern", [])
    if not isinstance(rows, list) or not isinstance(defaults, dict) or not all(isinstance(row, dict) for row in rows):
        raise PatternError(f"{path}: `pattern` must be an array of tables and `defaults` a table")
    return tuple(_pattern({**defaults, **row}, f"{path.name}: {row.get('id', '?')}") for row in rows)


def _pattern(row: Mapping[str, object], where: str) -> Pattern:
    missing = [key for key in _REQUIRED if not row.get(key)]
    unknown = sorted(set(row) - _KNOWN)
    if missing or unknown:
        raise PatternError(f"{where}: missing {missing}, unknown {unknown}", hint=f"a pattern has {sorted(_KNOWN)}")
    tier = int(str(row.get("tier", 6)))
    if tier not in TIERS:
        raise PatternError(f"{where}: tier {tier} is none of {sorted(TIERS)}")
    cause = row.get("cause")
    try:
        return Pattern(
            pattern_id=str(row["id"]),
            kind=Kind(row["kind"]),
            event=str(row["event"]),
            cause=Cause.of(str(cause)) if cause else None,
            tier=tier,
            rank=int(str(row.get("rank", 50))),
            engines=_words(row.get("engines", ["any"]), where),
            versions=str(row.get("versions", "any")),
            sources=frozenset(Source(word) for word in _words(row.get("sources", ["engine_log"]), where)),
            literals=_literals(row["literals"], where),
            regex=_regex(str(row["regex"]), where),
            origin=str(row["source"]),
            samples=_words(row["samples"], where),
            fatal=bool(row.get("fatal", False)),
            frequent=bool(row.get("frequent", False)),
        )
    except (ValueError, KeyError) as error:
        raise PatternError(
            f"{where}: {error}", hint="see docs/failures.md for labels and appliance/diagnosis/events.py for events"
        ) from error


def _words(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise PatternError(f"{where}: {value!r} is no list of words")
    return tuple(value)


def _literals(value: object, where: str) -> tuple[str, ...]:
    literals = _words(value, where)
    short = [literal for literal in literals if len(literal) < MIN_LITERAL]
    if short:
        raise PatternError(f"{where}: literal {short[0]!r} is shorter than {MIN_LITERAL} characters and would match nearly every line")
    return literals


def _regex(text: str, where: str) -> re.Pattern[str]:
    if _LAZY_HEAD.match(text):
        raise PatternError(f"{where}: starts with a catch-all ({text[:12]!r}); patterns are searched, leave the head off")
    if text.count(".*") > 3:
        raise PatternError(f"{where}: {text.count('.*')} catch-alls `.*`; at most 3, or one long line takes seconds")
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise PatternError(f"{where}: {error}") from error
    if compiled.search(""):
        raise PatternError(f"{where}: matches the empty line, so it matches everything")
    return compiled
