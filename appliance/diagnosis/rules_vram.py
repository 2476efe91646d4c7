"""Whose memory of the card it was, of an engine that could not have any while it started: an orphan of its own kind, another program's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.units import format_bytes, parse_bytes
from appliance.diagnosis.case import Case, engine_like
from appliance.diagnosis.events import Event, caused

MOST = 0.5
"""Who holds more than this share of a card is why an engine finds no room on it."""
_SIZE = r"(\d{1,6}(?:\.\d{1,4})? [KMGT]iB)"
_HAS = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_THIS = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_RESERVED = re.compile(rf"{_SIZE} is reserved by PyTorch")
_RESERVED_IN_TOTAL = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_OWN_PID = re.compile(r"^\(?[\w ]{0,40}\(?pid=(\d{1,10})")
_HOST_PID = 1000
"""An engine whose own numbers are all smaller lives in a container: nvidia-smi calls it by others."""


def held_by_other(event: Event, case: Case) -> Event | None:
    """The refused allocation of a start as somebody else's doing, where most of the card was theirs; None where it was not."""
    if event.phase.serving:
        return None
    total = _total(event, case)
    held, who = max(_held(event, case, total), default=(0.0, ""))
    if not total or held <= MOST * total:
        return None
    fields = {name: value for name, value in event.fields.items() if name not in ("free_bytes", "asked_bytes")}
    found = replace(event, fields=fields | {"held_bytes": held})
    return caused(found, Cause.VRAM_HELD_BY_OTHER, tier=2, rank=3, note=f"{who} of {format_bytes(round(total))}")


def _held(event: Event, case: Case, total: float) -> Iterator[tuple[float, str]]:
    """What others hold, by each account of it, in bytes and in words."""
    by_torch = _by_torch(event, total)
    yield by_torch, f"the sentence itself counts {format_bytes(round(by_torch))} as other processes'"
    free = max((value for other in case.named("gpu_free") if (value := _number(other, "free_bytes"))), default=0.0)
    if free and total:
        yield total - free, f"only {format_bytes(round(free))} were free when it began"
    listed = _listed(event, case)
    yield listed, f"nvidia-smi lists {format_bytes(round(listed))} of processes that are not the engine's"


def _by_torch(event: Event, total: float) -> float:
    """PyTorch lists who has memory of the card; inside a container by numbers that the engine does not know itself by."""
    sizes = {int(pid): float(parse_bytes(size)) for pid, size in _HAS.findall(event.text)}
    this = _bytes(_THIS, event.text)
    if sizes and not this:
        own = _own(event, sizes)
        return sum(size for pid, size in sizes.items() if pid != own)
    own_bytes = this or _bytes(_RESERVED_IN_TOTAL, event.text)
    free = _number(event, "free_bytes")
    return max(sum(sizes.values()), total - free - own_bytes) if own_bytes and free and total else sum(sizes.values())


def held_beside(event: Event, case: Case) -> float:
    """What others hold of the card, in bytes, by the refused allocation's own sentence."""
    return _by_torch(event, _total(event, case))


def _own(event: Event, sizes: dict[int, float]) -> int:
    """The number on the line, else the process nearest above what PyTorch itself has."""
    told = _OWN_PID.match(event.text)
    if told is not None and int(told[1]) in sizes:
        return int(told[1])
    least = _bytes(_ALLOCATED, event.text) + _bytes(_RESERVED, event.text)
    return min(sizes, key=lambda pid: (sizes[pid] < least, abs(sizes[pid] - least)))


def _listed(event: Event, case: Case) -> float:
    """Of nvidia-smi's processes on this card those that cannot be the engine's: by number, where its log tells any, or by name."""
    cards: dict[str, float] = {}
    numbered = max(case.engine_pids, default=0) >= _HOST_PID
    for row in case.named("gpu_process"):
        pid, name = str(row.fields.get("pid")), str(row.fields.get("name", ""))
        own = int(pid) in case.engine_pids if numbered else engine_like(name.rpartition("/")[2])
        if not own:
            card = str(row.fields.get("gpu"))
            cards[card] = cards.get(card, 0.0) + _number(row, "held_bytes")
    return cards.get(str(event.fields.get("gpu")), max(cards.values(), default=0.0))


def _total(event: Event, case: Case) -> float:
    own = _number(event, "total_bytes")
    return own or max((_number(other, "total_bytes") for other in case.named("gpu_free", "gpu_size")), default=0.0)


def _number(event: Event, name: str) -> float:
    value = event.fields.get(name)
    return value if isinstance(value, float) else 0.0


def _bytes(pattern: re.Pattern[str], text: str) -> float:
    match = pattern.search(text)
    return 0.0 if match is None else float(parse_bytes(match[1]))
