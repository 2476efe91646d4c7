"""The chain as a picture."""

from __future__ import annotations

from html import escape

from appliance.core.plan import MemoryPlan
from appliance.planner.chain import gib
from appliance.planner.draw import segments


def svg(plan: MemoryPlan, total_bytes: int, title: str) -> str:
    """An SVG document: the bar, and its figures as text."""
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
