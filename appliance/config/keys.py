"""What a key is: a dataclass field that carries its limits and its sentence.

load.py checks against them, `config show` and the annotated etc/appliance.toml print them. Sizes and durations may be written
with units in TOML ("24GiB", "30s"); inside they are bytes and seconds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """What the loader and the documentation know of a key."""

    doc: str
    unit: str = ""
    """"bytes" and "s" accept strings with units."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    items: type = str
    """Of a list: what it holds. The limits are those of each item."""


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    items: type = str,
) -> Any:
    """A dataclass field that carries its KeyFacts in its metadata."""
    facts = KeyFacts(doc, unit, minimum, maximum, choices, items)
    return field(default=default, metadata={"facts": facts})


def keys_of(table: type) -> dict[str, dataclasses.Field[Any]]:
    """Key name → field, for one table's dataclass."""
    return {f.name: f for f in dataclasses.fields(table)}


def facts_of(key_field: dataclasses.Field[Any]) -> KeyFacts:
    """The KeyFacts that `key()` attached."""
    facts = key_field.metadata["facts"]
    assert isinstance(facts, KeyFacts)
    return facts
