"""`explain NAME`: what a flag or environment variable of an engine really does."""

from __future__ import annotations

import difflib
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from appliance.core.errors import ApplianceError

EXPLAIN_FILE = Path(__file__).parent / "explain.toml"


class NoSuchName(ApplianceError):
    """Nothing is known of this name; the hint names the nearest ones."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One entry.

    Attributes:
        name: as the owner writes it: `--flag`, `VARIABLE`, `Key`.
        engines: whose it is; "any" for what is not an engine's.
        kind: flag, env, systemd, sysctl, module, kernel or config.
        default: by version where versions differ.
        trades: what one gives and gets by moving it.
        beware: the usual misunderstanding, or "".
        source: where it is written.
    """

    name: str
    engines: tuple[str, ...]
    kind: str
    default: str
    means: str
    trades: str
    source: str
    beware: str = ""

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{self.name}  ({self.kind}, {', '.join(self.engines)})", f"  means    {self.means}", f"  default  {self.default}"]
        lines.append(f"  trades   {self.trades}")
        if self.beware:
            lines.append(f"  beware   {self.beware}")
        return "\n".join([*lines, f"  source   {self.source}"])


def explain(name: str) -> Explanation:
    """The entry of this name, however it is written: `mem-fraction-static`, `--mem_fraction_static`, `sglang_...`.

    Raises:
        NoSuchName: nothing is known of it.
    """
    entries = {_key(entry.name): entry for entry in explanations()}
    found = entries.get(_key(name))
    if found is None:
        near = difflib.get_close_matches(_key(name), entries, n=3, cutoff=0.6)
        nearest = ", ".join(entries[key].name for key in near)
        hint = f"nearest: {nearest}" if nearest else "`appliancectl explain` without a name lists what is known"
        raise NoSuchName(f"nothing is known of {name!r}", hint=hint)
    return found


@functools.cache
def explanations() -> tuple[Explanation, ...]:
    """All entries, in the file's order."""
    rows = tomllib.loads(EXPLAIN_FILE.read_text(encoding="utf-8"))["entry"]
    return tuple(Explanation(**{**row, "engines": tuple(row["engines"])}) for row in rows)


def _key(name: str) -> str:
    return name.strip().lstrip("-").partition("=")[0].replace("_", "-").lower()
