"""docs/failures.md, written from the causes, the remedies, the edges and the patterns: `python -m appliance.diagnosis.failures_page`."""

from __future__ import annotations

from appliance.core.causes import Cause
from appliance.diagnosis.catalogue import load_catalogue
from appliance.diagnosis.causality import edges
from appliance.diagnosis.pattern import TIERS, Kind
from appliance.diagnosis.remedies import action_for, sentence_of

HEAD = """# Failures: what ends an engine, and what is done about it

Written from the tables of `appliance/diagnosis`; change those, then `python -m appliance.diagnosis.failures_page > docs/failures.md`.

A verdict is made in four steps: lines become events (patterns), events become definite in their company (rules: the phase of an
allocation failure, who asked for a stop, whose process an Xid names), deeper events explain shallower ones inside a window of time
(tiers and named edges), and the root is the event that nothing else explains. `unknown` is an answer: the evidence is kept.

## Depth
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip("\n"), "", "| tier | what |", "|---|---|", *(f"| {tier} | {what} |" for tier, what in TIERS.items()), ""]
    lines += ["## Named edges", "", "| cause | explains | why |", "|---|---|---|"]
    explained: dict[tuple[Cause, str], list[str]] = {}
    for (cause, effect), why in edges().items():
        explained.setdefault((cause, why), []).append(f"`{effect.label}`")
    lines += [f"| `{cause.label}` | {', '.join(effects)} | {why} |" for (cause, why), effects in explained.items()]
    for group in dict.fromkeys(cause.group for cause in Cause):
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", "| label | what happened | first action | patterns |", "|---|---|---|---|"]
        lines += [_row(cause) for cause in Cause if cause.group == group]
    return "\n".join(lines) + "\n"


def _row(cause: Cause) -> str:
    ids = [
        f"`{pattern.pattern_id}`"
        for pattern in load_catalogue().patterns
        if (pattern.cause is cause or pattern.event == cause.label) and pattern.kind in (Kind.CAUSE, Kind.BENIGN)
    ]
    return f"| `{cause.label}` | {sentence_of(cause)} | {action_for(cause).value} | {', '.join(ids) or 'by rule'} |"


if __name__ == "__main__":
    print(page(), end="")
