"""docs/configuration.md from the schema: `python -m appliance.config.reference > docs/configuration.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from appliance.config.annotate import legal_words, toml_value
from appliance.config.keys import facts_of, keys_of
from appliance.config.schema import tables

_PAGE = re.compile(r"\bdocs/([a-z0-9-]+)\.md")
_HEAD = """\
# Configuration reference

Written from `appliance/config/schema.py` and `client_tables.py`; change those, then `make format`. The same keys stand in
`etc/appliance.toml` and in `man appliance.toml`.

`/etc/llm-appliance/appliance.toml` is read first, then `/etc/llm-appliance/conf.d/*.toml` in the order of their names; a later file wins,
key by key. Sizes and durations may have units: "24GiB", "512MiB", "30s", "10min", "24h". Unknown tables and keys are errors.

```sh
appliancectl config check     # every error at once, before anything is restarted
appliancectl config show      # what is in force, and where each value came from
```
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for table, kind in tables().items() for line in _table(table, kind))]) + "\n"


def _table(table: str, kind: type) -> Iterator[str]:
    said = (kind.__doc__ or "").partition("] ")[2]
    yield from (f"## [{table}]", "", f"{said[:1].upper()}{said[1:]}", "", "| key | default | meaning |", "|---|---|---|")
    for name, key_field in keys_of(kind).items():
        facts = facts_of(key_field)
        words = f"{facts.doc} {legal_words(facts)}".strip()
        yield f"| `{name}` | `{toml_value(key_field.default, facts)}` | {_cell(words)} |"
    yield ""


def _cell(words: str) -> str:
    return _PAGE.sub(r"[\1](\1.md)", words.replace("|", "\\|").replace("<", "&lt;"))


if __name__ == "__main__":
    sys.stdout.write(reference())
