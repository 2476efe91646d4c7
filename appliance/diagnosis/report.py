"""The verdict in words: plain text, Markdown to paste into an issue, and the dictionary behind `--json`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Diagnosis
from appliance.core.units import format_bytes, format_duration
from appliance.diagnosis.remedies import action_for

LONGEST_QUOTE = 240


def to_json_dict(diagnosis: Diagnosis, found: Sequence[str] = ()) -> dict[str, object]:
    """The dictionary of `--json`: always the same keys, `root` is null where there is none. `found`: see `text`."""
    return {
        "cause": diagnosis.cause.label,
        "confidence": diagnosis.confidence.value,
        "sentence": diagnosis.sentence,
        "root": None if diagnosis.root is None else _citation(diagnosis.root),
        "chain": [{"role": link.role.value, "label": link.label, **_citation(link.citation)} for link in diagnosis.chain],
        "doubts": list(diagnosis.doubts),
        "refuted": [
            {"cause": item.cause.label, "reason": item.reason, "evidence": None if item.citation is None else _citation(item.citation)}
            for item in diagnosis.refuted
        ],
        "dumps": list(found),
        "action": action_for(diagnosis.cause).value,
        "remedies": list(diagnosis.remedies),
        "safer_config": dict(diagnosis.safer_config),
        "numbers": dict(diagnosis.numbers),
    }


def text(diagnosis: Diagnosis, *, did: str | None = None, found: Sequence[str] = ()) -> str:
    """The report for a terminal, without colours.

    Args:
        did: what the appliance did, where there is one; else it says what it would do.
        found: what stacks and dumps show (`dumps.found_in`).
    """
    lines = [f"{diagnosis.cause.label}  (confidence: {diagnosis.confidence.value})", diagnosis.sentence, ""]
    if diagnosis.root is not None:
        lines += ["Root", f"  {_place(diagnosis.root)}", f"  {_quote(diagnosis.root.text)}", ""]
    if len(diagnosis.chain) > 1:
        lines += [
            "Chain",
            *(f"  {link.role.value:<12} {_place(link.citation)}  {_quote(link.citation.text)}" for link in diagnosis.chain),
            "",
        ]
    if diagnosis.doubts:
        lines += ["Not certain, because", *(f"  {doubt}" for doubt in diagnosis.doubts), ""]
    if diagnosis.refuted:
        lines += ["Refuted", *(f"  {item.cause.label}: {item.reason}" for item in diagnosis.refuted), ""]
    if found:
        lines += ["Stacks, dumps and the recorder", *(f"  {item}" for item in found), ""]
    if diagnosis.numbers:
        lines += ["Numbers", *(f"  {name:<16} {number(name, value)}" for name, value in diagnosis.numbers), ""]
    if diagnosis.remedies:
        lines += ["What to do", *(f"  {index}. {remedy}" for index, remedy in enumerate(diagnosis.remedies, 1)), ""]
    if diagnosis.safer_config:
        lines += ["Settings to move", *(f"  {key} = {value}" for key, value in diagnosis.safer_config), ""]
    lines.append(did or f"The appliance would: {action_for(diagnosis.cause).value}")
    return "\n".join(lines)


def markdown(diagnosis: Diagnosis, found: Sequence[str] = ()) -> str:
    """The report for an issue. `found`: see `text`."""
    lines = [f"**{diagnosis.cause.label}** (confidence {diagnosis.confidence.value}): {diagnosis.sentence}", ""]
    if diagnosis.root is not None:
        lines += [f"Root, {_place(diagnosis.root)}:", "```", diagnosis.root.text[:2000].replace("```", "'''"), "```", ""]
    if len(diagnosis.chain) > 1:
        lines += ["| role | where | line |", "|---|---|---|"]
        lines += [f"| {link.role.value} | {_place(link.citation)} | `{_cell(link.citation.text)}` |" for link in diagnosis.chain]
        lines.append("")
    if diagnosis.doubts:
        lines += ["Not certain, because:", *(f"- {doubt}" for doubt in diagnosis.doubts), ""]
    if diagnosis.refuted:
        lines += ["Refuted:", *(f"- `{item.cause.label}`: {item.reason}" for item in diagnosis.refuted), ""]
    if found:
        lines += ["Stacks, dumps and the recorder:", *(f"- {item}" for item in found), ""]
    if diagnosis.remedies:
        lines += ["What to do:", *(f"{index}. {remedy}" for index, remedy in enumerate(diagnosis.remedies, 1)), ""]
    return "\n".join(lines).rstrip() + "\n"


def number(name: str, value: float) -> str:
    """A number of the case with its unit."""
    if name.endswith("_bytes"):
        return format_bytes(round(value))
    if name.endswith("_s"):
        return format_duration(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def headline(cause: Cause) -> str:
    """The label with its definition."""
    return f"{cause.label}: {cause.definition}"


def _citation(citation: Citation) -> dict[str, object]:
    return {"source": citation.source.value, "line": citation.line, "text": citation.text, "time": moment(citation.time_s)}


def moment(time_s: float | None) -> str | None:
    """In UTC, as all reports say it; None for no time, or one that no calendar has."""
    if time_s is None:
        return None
    try:
        found = datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):  # a clock that says nonsense
        return None
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _place(citation: Citation) -> str:
    where = f"{citation.source.value}:{citation.line}" if citation.line else citation.source.value
    stamp = moment(citation.time_s)
    return where if stamp is None else f"{where} at {stamp}"


def _quote(line: str) -> str:
    """One line, shortened in its middle."""
    flat = " ".join(line.split())
    if len(flat) <= LONGEST_QUOTE:
        return flat
    return f"{flat[: LONGEST_QUOTE * 2 // 3]} … {flat[-LONGEST_QUOTE // 3 :]}"


def _cell(line: str) -> str:
    return _quote(line).replace("|", "\\|").replace("`", "'")
