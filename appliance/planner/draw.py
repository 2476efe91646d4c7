"""The chain as a bar of characters."""

from __future__ import annotations

from dataclasses import dataclass

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
