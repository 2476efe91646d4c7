"""A card that is lost answers nothing any more: an engine that went on computing long after was not on that card, or it came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.causality import distance_s
from appliance.diagnosis.events import Event
from appliance.diagnosis.timeline import ENGINE_SOURCES

_SILENT = frozenset({Cause.GPU_OFF_BUS, Cause.GPU_MCU_HALT})
_COMPUTED = ("decode", "prefill")
"""An answer of the HTTP server alone proves nothing."""
LONG_S = 120.0


def outlived(events: Sequence[Event]) -> tuple[list[Event], tuple[Event, ...]]:
    """The events without the losses of cards that the engine outlived; and those, each with a note."""
    computed = [event.evidence for event in events if event.name in _COMPUTED and event.source in ENGINE_SOURCES]
    last = next((item for item in reversed(computed) if item.time_s is not None), None)
    if last is None:
        return list(events), ()
    lost = {id(event): event for event in events if event.source is Source.KERNEL_LOG and event.cause in _SILENT and event.is_suspect}
    aside: dict[int, Event] = {}
    for key, event in lost.items():
        later_s = distance_s(last, event.evidence)
        same_zone = bool(last.data.get("zone_unknown")) is bool(event.evidence.data.get("zone_unknown"))
        if later_s is not None and later_s > LONG_S and same_zone:
            aside[key] = replace(
                event, sure=False, note=f"the engine went on computing for {later_s:.0f} s after it: another card, or it came back"
            )
    return [event for event in events if id(event) not in aside], tuple(aside.values())
