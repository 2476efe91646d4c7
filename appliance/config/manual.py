"""docs/man/appliance.toml.5 from the schema: `python -m appliance.config.manual > docs/man/appliance.toml.5`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from appliance.config.annotate import installed, legal_words, toml_value
from appliance.config.keys import facts_of, keys_of
from appliance.config.schema import tables

_HEAD = """\
.\\" Generated: python -m appliance.config.manual
.TH APPLIANCE.TOML 5 "" "llm-appliance" "LLM appliance"
.SH NAME
appliance.toml \\- configuration of the LLM appliance
.SH SYNOPSIS
.I /etc/llm\\-appliance/appliance.toml
.br
.I /etc/llm\\-appliance/conf.d/*.toml
.SH DESCRIPTION
TOML. Files in conf.d are read after appliance.toml, in the order of their names; a later file wins, key by key. Unknown tables and
keys are errors. Sizes and durations may be written with units: "24GiB", "512MiB", "30s", "10min", "24h".
.PP
.B appliancectl config check
reads it all and prints every error;
.B appliancectl config show
prints what is in force and where each value came from.
.B systemctl reload llm\\-appliance
makes applianced read it again."""
_TAIL = """\
.SH EXAMPLE
.nf
[model]
path = "/srv/models/my\\-model"

[gateway]
port = 8080
.fi
.SH SEE ALSO
.BR appliancectl (1),
.BR applianced (8),
.BR llm\\-appliance (7)"""


def manual() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for table, kind in tables().items() for line in _table(table, kind)), _TAIL]) + "\n"


def _table(table: str, kind: type) -> Iterator[str]:
    said = (kind.__doc__ or "").partition("] ")[2]
    yield from (f".SH [{table.upper()}]", _escaped(f"{said[:1].upper()}{said[1:]}"))
    for name, key_field in keys_of(kind).items():
        facts = facts_of(key_field)
        words = installed(f"{facts.doc} {legal_words(facts)}".strip())
        default = f"Default: {toml_value(key_field.default, facts)}"
        yield from (".TP", f".B {_escaped(name)}", _escaped(words), ".br", _escaped(default))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    sys.stdout.write(manual())
