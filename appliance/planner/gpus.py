"""Cards: what CUDA can really see of the memory on the label, and how a card may be named."""

from __future__ import annotations

import re
from dataclasses import replace

from appliance.core.plan import GpuFacts
from appliance.core.units import GIB, format_bytes
from appliance.planner.inputs import PlanInputError

_LABEL_LOSS_FIXED_BYTES = round(0.26 * GIB)
_LABEL_LOSS_SHARE = 0.0075
"""CUDA sees less than the label: firmware, page tables. 24 → 23.56, 80 → 79.14, 48 → 47.38, 16 → 15.62, 12 → 11.65 GiB: within 0.5 %
of what torch prints as "total capacity" on cards without ECC."""

CARDS: dict[str, tuple[float, tuple[int, int]]] = {
    "rtx3090": (23.56, (8, 6)), "rtx3090ti": (23.56, (8, 6)), "rtx3080": (9.65, (8, 6)), "rtx3080ti": (11.65, (8, 6)),
    "rtx3070": (7.66, (8, 6)), "rtx3060": (11.63, (8, 6)), "rtxa6000": (47.40, (8, 6)), "rtxa5000": (23.56, (8, 6)),
    "rtxa4000": (15.62, (8, 6)), "a40": (44.42, (8, 6)), "a10": (22.06, (8, 6)), "a10g": (22.06, (8, 6)),
    "rtx4090": (23.52, (8, 9)), "rtx4080": (15.58, (8, 9)), "rtx4070ti": (11.60, (8, 9)), "rtx4070": (11.60, (8, 9)),
    "rtx4060ti16g": (15.57, (8, 9)), "rtx6000ada": (47.38, (8, 9)), "l40s": (44.40, (8, 9)), "l40": (44.40, (8, 9)), "l4": (22.03, (8, 9)),
    "rtx5090": (31.36, (12, 0)), "rtx5080": (15.47, (12, 0)), "rtx5070ti": (15.47, (12, 0)), "rtxpro6000": (94.97, (12, 0)),
    "a10040g": (39.39, (8, 0)), "a10080g": (79.15, (8, 0)), "a100": (79.15, (8, 0)), "a30": (23.50, (8, 0)),
    "h100": (79.11, (9, 0)), "h10080g": (79.11, (9, 0)), "h100nvl": (93.10, (9, 0)), "h200": (139.72, (9, 0)), "gh200": (94.50, (9, 0)),
    "b200": (178.35, (10, 0)), "t4": (14.56, (7, 5)), "v100": (31.73, (7, 0)), "v10032g": (31.73, (7, 0)), "v10016g": (15.77, (7, 0)),
    "rtx2080ti": (10.57, (7, 5)),
}  # fmt: skip
"""Short name → (GiB that CUDA sees, compute capability), from "total capacity" lines of public reports; L4, L40S, A10 and A40 with ECC."""

_MAKER_WORDS = re.compile(r"nvidia|geforce|tesla|quadro|generation|blackwell|workstation|edition|server|max-?q|hbm3e?|sxm\d?|pcie|[\s_-]")
_LABEL = re.compile(r"([0-9]{1,12})\s*(?:gib|gb|g)", re.IGNORECASE)
_EXACT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(gib|gb|g|mib|mb|m)", re.IGNORECASE)


def gpu_facts(named: str) -> GpuFacts:
    """The facts of "rtx3090", "NVIDIA GeForce RTX 3090", "a100-80g", "24GiB" (a label) or "23.56GiB" (what CUDA sees).

    A whole number of GiB is what is printed on the box, so CUDA sees less of it; a fraction is taken as what CUDA sees.

    Raises:
        PlanInputError: no such card, or no size.
    """
    label = _LABEL.fullmatch(named.strip())
    if label:
        return _checked(GpuFacts(f"a {label[1]} GiB card", visible_of_label(int(label[1]) * GIB)))
    exact = _EXACT.fullmatch(named.strip())
    if exact:
        size_bytes = round(float(exact[1]) * (GIB if exact[2].lower().startswith("g") else GIB // 1024))
        if size_bytes % GIB == 0:  # 24576MiB: nvidia-smi prints the label too
            return _checked(GpuFacts(f"a {size_bytes // GIB} GiB card", visible_of_label(size_bytes)))
        return _checked(GpuFacts(f"a card that shows {named.strip()}", size_bytes))
    short = short_name(named)
    if short not in CARDS:
        known = ", ".join(sorted(CARDS))
        raise PlanInputError(
            f"{named[:60]!r} is no card that we know and no size", hint=f"write its size, such as 24GiB, or one of: {known}"
        )
    visible_gib, capability = CARDS[short]
    return GpuFacts(short, round(visible_gib * GIB), compute_capability=capability)


def card_facts(name: str, total_bytes: int, free_bytes: int, uuid: str, address: str, nvlinks: int | None = None) -> GpuFacts:
    """The facts of a card that says these: what CUDA sees of it where we know the name, else what it sees of such a size."""
    try:
        facts = gpu_facts(name)
    except PlanInputError:
        facts = gpu_facts(f"{-(-total_bytes // GIB)}GiB")
    free_bytes = min(free_bytes, facts.total_bytes)
    return replace(facts, name=name, uuid=uuid, pci_bus_id=address, free_at_start_bytes=free_bytes, nvlinks=nvlinks)


def short_name(named: str) -> str:
    """ "NVIDIA GeForce RTX 3090" → "rtx3090", "A100-SXM4-80GB" → "a10080g", "3090" → "rtx3090"."""
    short = _MAKER_WORDS.sub("", named.lower())
    short = re.sub(r"(\d+)gi?b$", r"\1g", short)
    for candidate in (short, "rtx" + short, re.sub(r"\d+g$", "", short), "rtx" + re.sub(r"\d+g$", "", short)):
        if candidate in CARDS:
            return candidate
    return short


def visible_of_label(label_bytes: int) -> int:
    """What CUDA sees of the size on the label: label − 0.26 GiB − 0.75 %."""
    return max(0, label_bytes - _LABEL_LOSS_FIXED_BYTES - round(label_bytes * _LABEL_LOSS_SHARE))


def _checked(facts: GpuFacts) -> GpuFacts:
    if facts.total_bytes < GIB // 2:
        raise PlanInputError(
            f"a card of {format_bytes(facts.total_bytes)} is too small for any model", hint="write the size with its unit: 24GiB"
        )
    return facts
