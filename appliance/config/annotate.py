"""etc/appliance.toml from the schema: `python -m appliance.config.annotate > etc/appliance.toml`.

Every key stands there commented out at its default, so that the file says what the program does and an owner's
edit is a line without its `#`. A test holds the committed file to this output.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from appliance.config.keys import KeyFacts, facts_of, keys_of
from appliance.config.schema import tables
from appliance.core.units import GIB, KIB, MIB

_HEAD = """\
# Configuration of the LLM appliance.
#
# Every key is here, commented out at its default: remove the "#" in front of a key to change it. Files in conf.d/
# beside this one (*.toml, in name order) win over it, key by key; put there what must survive an upgrade untouched.
# Sizes and durations may be written with units: "24GiB", "512MiB", "30s", "10min", "24h".
# After an edit: appliancectl config check. What is in force, and from where: appliancectl config show.
"""
_WIDTH = 118
_PAGE = re.compile(r"\bdocs/([a-z0-9-]+\.md)")
_PAGES_DIR = "/usr/share/doc/llm-appliance"
"""Where the package puts docs/ (packaging/debian/llm-appliance.docs)."""
_SIZES = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_DURATIONS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def annotated() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *(line for table, kind in tables().items() for line in _table(table, kind))])


def installed(text: str) -> str:
    """With the pages of the documentation named as they lie on a machine with the package."""
    return _PAGE.sub(rf"{_PAGES_DIR}/\1", text)


def toml_value(value: Any, facts: KeyFacts) -> str:
    """The value as a person would write it in TOML: with its unit where it has one; reading it back gives the value."""
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item, KeyFacts("")) for item in value) + "]"
    if facts.unit in ("bytes", "s"):
        return _with_unit(value, _SIZES if facts.unit == "bytes" else _DURATIONS)
    # JSON's strings, numbers and booleans are TOML's too, DEL excepted.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_unit(value: float, units: tuple[tuple[str, int], ...]) -> str:
    for unit, factor in units:
        if value % factor == 0 and (value or factor == 1):
            return f'"{int(value) // factor}{unit}"'
    # Fractions of seconds; the few that Python writes with an exponent ("1e-05") stay TOML numbers.
    return repr(value) if "e" in repr(value) else f'"{value!r}s"'


def _table(table: str, kind: type) -> Iterator[str]:
    said = (kind.__doc__ or "").partition("] ")[2]
    yield f"# {said[:1].upper()}{said[1:]}"
    yield f"[{table}]"
    for name, key_field in keys_of(kind).items():
        facts = facts_of(key_field)
        words = installed(f"{facts.doc} {legal_words(facts)}")
        yield from textwrap.wrap(words, _WIDTH, break_on_hyphens=False, initial_indent="# ", subsequent_indent="# ")
        yield f"#{name} = {toml_value(key_field.default, facts)}"
    yield ""


def legal_words(facts: KeyFacts) -> str:
    """The limits in words; empty where there are none."""
    if facts.choices:
        return "One of: " + ", ".join(toml_value(choice, facts) for choice in facts.choices) + "."
    low = None if facts.minimum is None else _limit(facts.minimum, facts)
    high = None if facts.maximum is None else _limit(facts.maximum, facts)
    if low is not None and high is not None:
        return f"From {low} to {high}."
    return f"At least {low}." if low is not None else f"At most {high}." if high is not None else ""


def _limit(limit: float, facts: KeyFacts) -> str:
    if facts.unit:
        return toml_value(int(limit) if facts.unit == "bytes" else limit, facts)
    return f"{limit:g}" if limit != int(limit) else str(int(limit))


if __name__ == "__main__":
    sys.stdout.write(annotated())
