"""The chain as a bar: for a terminal, and as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from appliance.core.plan import MemoryPlan
from appliance.planner.chain import gib

_ORDER = (
    ("weights", "█", "#4269d0"),
    ("non-torch", "▚", "#9498a0"),
    ("linear state", "▓", "#a463f2"),
    ("KV pool", "▒", "#3ca951"),
    ("KV cache", "▒", "#3ca951"),
    ("workspaces and graphs", "▞", "#9c6b4e"),
    ("CUDA graphs", "▞", "#9c6b4e"),
    ("prefill peak", "▤", "#ff725c"),
    ("compute buffer", "▤", "#ff725c"),
)
_TAKEN = ("context and others", "░", "#c7c9cf")
_SPARE = ("spare", "·", "#f3f4f6")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the card, in the order of the chain."""

    name: str
    size_bytes: int
    character: str
    colour: str


def segments(plan: MemoryPlan, total_bytes: int) -> tuple[Segment, ...]:
    """The card's parts, context first, what is spare last. They add up to the card unless the plan asks for more than there is."""
    sizes = {term.name: term.size_bytes for term in plan.terms}
    parts = [Segment(_TAKEN[0], total_bytes - plan.free_at_start_bytes, *_TAKEN[1:])]
    parts += [Segment(name, sizes[name], character, colour) for name, character, colour in _ORDER if name in sizes]
    spare = total_bytes - sum(part.size_bytes for part in parts)
    parts.append(Segment(_SPARE[0], spare, *_SPARE[1:]))
    return tuple(part for part in parts if part.size_bytes > 0)


def bar(plan: MemoryPlan, total_bytes: int, width: int = 72) -> tuple[tuple[str, ...], str]:
    """(one string a segment, the legend). Every segment has a character at least; the whole is `width` wide."""
    parts = segments(plan, total_bytes)
    widths = _widths([part.size_bytes for part in parts], width)
    pieces = tuple(part.character * columns for part, columns in zip(parts, widths, strict=True))
    legend = "  ".join(f"{part.character} {part.name} {gib(part.size_bytes)}" for part in parts)
    return pieces, legend


def _widths(sizes: list[int], width: int) -> list[int]:
    """Columns by size, one at least, the largest part taking the rounding."""
    total = sum(sizes) or 1
    columns = [max(1, round(size / total * width)) for size in sizes]
    columns[sizes.index(max(sizes))] += width - sum(columns)
    return columns


def svg(plan: MemoryPlan, total_bytes: int, title: str) -> str:
    """The same as a picture, with its figures as text."""
    parts = segments(plan, total_bytes)
    total = sum(part.size_bytes for part in parts) or 1
    width, height = 960, 96 + 22 * len(parts)
    rows = [f'<text x="16" y="26" font-size="16">{escape(title)}</text>']
    at = 16.0
    for number, part in enumerate(parts):
        columns = part.size_bytes / total * (width - 32)
        tip = escape(f"{part.name}: {gib(part.size_bytes)}")
        rows.append(
            f'<rect x="{at:.1f}" y="40" width="{columns:.1f}" height="36" fill="{part.colour}" stroke="#fff"><title>{tip}</title></rect>'
        )
        y = 104 + 22 * number
        rows.append(f'<rect x="16" y="{y - 12}" width="14" height="14" fill="{part.colour}" stroke="#999"/>')
        rows.append(f'<text x="38" y="{y}" font-size="13">{tip}</text>')
        at += columns
    body = "\n".join(rows)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">\n{body}\n</svg>\n'
