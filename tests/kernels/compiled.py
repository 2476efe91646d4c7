"""What the kernels take on cards that are not here: compiled.json, made by compile_ahead.py, and the limits that it is held to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("compiled.json")
DOCUMENT = _ROOT / "docs" / "kernels.md"
CAPABILITIES = (86, 89, 90)
MOST_SHARED_BYTES = {86: 101_376, 89: 101_376, 90: 232_448}
MOST_REGISTERS = 65_536
"""Of a block of threads."""
_BEGIN, _END = "<!-- compiled: begin -->\n", "<!-- compiled: end -->\n"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel on one kind of card.

    Attributes:
        swaps: atomic compare-and-swaps in its code.
        matrix: tensor-core instructions in its code; matrix_wanted: it must have some.
        barriers: that stand in the kernel itself, beside those that the compiler needs for its own sums.
    """

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    swaps: int
    matrix: int
    matrix_wanted: bool
    barriers: int

    def complaints(self) -> list[str]:
        """Why it would not run on its card, or not as it should. `triton.compile` itself refuses none of these."""
        where, most = f"{self.name} on sm_{self.capability}", MOST_SHARED_BYTES[self.capability]
        found = []
        if self.spilled_bytes:
            found.append(f"{where} spills {self.spilled_bytes} bytes; a smaller tile, or more warps")
        if self.shared_bytes > most:
            found.append(f"{where} needs {self.shared_bytes} bytes of shared memory of {most}; a smaller tile, or fewer stages")
        if self.registers * 32 * self.warps > MOST_REGISTERS:
            found.append(f"{where} needs {self.registers * 32 * self.warps} registers a block, the card has {MOST_REGISTERS}")
        if self.matrix_wanted and not self.matrix:
            found.append(f"{where} multiplies matrices without a tensor-core instruction")
        if self.name.startswith("refcount.") and not self.swaps:
            found.append(f"{where} has no atomic compare-and-swap")
        if self.name.startswith("sample.") and not self.barriers:
            found.append(f"{where} reads what its other threads wrote without a barrier between")
        return found


def source_digest() -> str:
    """Of everything that decides what the compiler makes: the kernels, what is compiled of them, and the compiler's version."""
    digest = hashlib.sha256(metadata.version("triton").encode())
    for path in sorted([*(_ROOT / "kernels").glob("*/triton.py"), _ROOT / "kernels/tables.py", Path(__file__).with_name("variants.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_table() -> tuple[str, list[Compiled]]:
    """The digest of the sources that it was made of, and the kernels."""
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    return found["sources"], [Compiled(**row) for row in found["kernels"]]


def document_table(kernels: Sequence[Compiled]) -> str:
    """For docs/kernels.md: registers a thread, and KiB of shared memory, for each card."""
    lines = [f"| kernel | warps | {' | '.join(f'sm_{one}' for one in CAPABILITIES)} | tensor cores |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one.name for one in kernels if not one.name.endswith(".ones")):
        on = {one.capability: one for one in kernels if one.name == name}
        cells = " | ".join(f"{on[card].registers} / {on[card].shared_bytes / 1024:.1f}" for card in CAPABILITIES)
        lines.append(f"| `{name}` | {on[86].warps} | {cells} | {'yes' if all(one.matrix for one in on.values()) else ''} |")
    return "\n".join(lines) + "\n"


def document_part() -> str:
    """The table that stands in docs/kernels.md."""
    return DOCUMENT.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def write_document(kernels: Sequence[Compiled]) -> None:
    """Put the table where it belongs."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(before + _BEGIN + document_table(kernels) + _END + after, encoding="utf-8")
