"""What else is told in the words of a root line, where nothing beside it says which it was."""

from __future__ import annotations

import itertools
import re

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.core.units import format_bytes
from appliance.diagnosis.case import Case
from appliance.diagnosis.events import Event
from appliance.diagnosis.rules_vram import held_beside

_LATE_CUBLAS = re.compile(
    r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|MAPPING_ERROR)|function failed to launch|program failed to execute|"
    r"internal operation failed|library was not initialized|access to GPU memory space failed"
)
_OOM = frozenset({Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME})
SMALL, LARGE = 0.1, 0.25
"""Of a card: what is held by others and explains no refused start; and what takes part in a refused allocation."""
_LOST = frozenset({Cause.GPU_OFF_BUS, Cause.GPU_MCU_HALT, Cause.GSP_TIMEOUT})
_CARD = re.compile(r"([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-9a-f])?$")
_ALIVE = re.compile(r"\d{1,4}W\s*/\s*\d{1,4}W\s*\|\s*\d{1,8}MiB\s*/\s*\d{1,8}MiB")


def same_words(root: Event, case: Case) -> str | None:
    """The account that the same line would have, in words; None where it has no other."""
    if root.cause is Cause.CUBLAS_ERROR and _LATE_CUBLAS.search(root.text) is not None:
        return "cuBLAS says the same where memory ran out, or where a kernel before it had failed"
    if root.cause is Cause.SIGILL_CPU and root.phase.serving:
        return "it had served before: code that gives up with a trap, or that was overwritten, ends so too"
    if root.cause is Cause.VRAM_HELD_BY_OTHER and (held := _held(root)) is not None and held[0] < SMALL * held[1]:
        return f"others hold {format_bytes(round(held[0]))} of {format_bytes(round(held[1]))}: more may have been asked for than a card has"
    if root.cause in _OOM and (beside := held_beside(root, case)) > 0 and beside > LARGE * _number(root, "total_bytes"):
        return f"the sentence leaves {format_bytes(round(beside))} of the card to others"
    if root.cause in _LOST and _answers(root, case):
        return "nvidia-smi, given with it, shows this card at work: it came back, or what was read is old"
    return None


def _held(root: Event) -> tuple[float, float] | None:
    free, total = _number(root, "free_bytes"), _number(root, "total_bytes")
    return (total - free, total) if free and total and "asked_bytes" in root.fields else None


def _answers(root: Event, case: Case) -> bool:
    """The card's row of nvidia-smi's table, and below it one with power and memory."""
    match = _CARD.search(str(root.fields.get("bdf") or "").lower())
    rows = [item.text for item in case.lines_of(Source.NVIDIA_SMI)]
    if match is None:
        return False
    return any(match[1] in head.lower() and _ALIVE.search(row) is not None for head, row in itertools.pairwise(rows))


def _number(event: Event, name: str) -> float:
    value = event.fields.get(name)
    return value if isinstance(value, float) else 0.0
