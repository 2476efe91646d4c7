"""What is asked for to be looked at, beyond `status`: the ladder and the flight recorder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.control.codec import rung_to_json, to_json
from appliance.control.server import Handler
from appliance.core.errors import ControlError
from appliance.diagnosis import incident_report
from appliance.diagnosis.redact import Redactor
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.flight_recorder import CardsSample
from appliance.supervisor.machine import MachineState
from appliance.supervisor.records import TOLD_MAX, no_more

_OF_THE_BOX = ("driver", "cards")
"""Of a flight record, for incidents: no columns of samples, and `cards` tells more."""
_COLUMNS = ("used_bytes", "power_w", "temperature_c", "pcie_generation", "pcie_width", "pcie_replays")
Document = Mapping[str, Any]


class Views:
    """Reads the supervisor; changes nothing."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def handlers(self) -> dict[str, Handler]:
        """For the control server."""
        return {verb.__name__: verb for verb in (self.ladder, self.flight)}

    async def ladder(self, arguments: Document) -> Document:
        """Every rung, which is in force, and why that one; what starts of this engine measured."""
        no_more(arguments)
        state = self._supervisor.state
        newest = await asyncio.to_thread(self._supervisor.store.recent, TOLD_MAX)
        return {
            "rungs": [rung_to_json(rung) for rung in state.ladder],
            "in_force": state.history.rung,
            "why": why_this_rung(state.history.rung, state.history.wants, newest),
            "below": what_stands_below(state),
            "tried": [
                {"cause": entry.cause.label, "rung": rung.index, "times": entry.times}
                for entry in state.history.tried
                for rung in state.ladder
                if entry.times and rung.setting == entry.setting
            ],
            "measured": to_json(self._supervisor.budget.measured),
        }

    async def flight(self, arguments: Document) -> Document:
        """What the flight recorder has of after `since_s`."""
        no_more(arguments, "since_s")
        since_s = arguments.get("since_s", 0)
        if not isinstance(since_s, (int, float)) or isinstance(since_s, bool):
            raise ControlError(f"since_s = {since_s!r} is no number of seconds")
        samples, cards = self._supervisor.flight.since(float(since_s))
        config, rung = self._supervisor.config, self._supervisor.state.rung
        block_tokens = config.engine.block_tokens if config.engine.backend == "native" else rung.block_tokens
        columns = {name: column for name, column in to_json(samples).items() if name not in _OF_THE_BOX}
        return {"samples": columns, "cards": by_card(cards), "block_tokens": block_tokens}


def what_stands_below(state: MachineState) -> str:
    """What the rungs below the one in force are, in a sentence."""
    if state.history.rung == len(state.ladder) - 1:
        return "there is no safer one that is known now; what helps is worked out when the engine is lost"
    if state.history.below:
        return "those below were worked out when the last one was taken; another failure may call for others"
    return "those below are for a prompt that runs out of memory; another failure may call for others"


def why_this_rung(rung: int, wants: int | None, newest_first: Sequence[Document]) -> str:
    """Why the ladder stands where it does, in a sentence."""
    if wants is not None and wants != rung:
        return f"rung {wants} needs more cards than can be used now"
    if rung == 0:
        return "the setting that is configured"
    for incident in newest_first:
        if incident["rung_after"] == rung != incident["rung_before"]:
            return f"{incident_report.basis(incident, Redactor())} ({incident['incident_id']})"
    return "a person chose it, or a safer one has held for long enough"


def by_card(samples: Sequence[CardsSample]) -> list[dict[str, Any]]:
    """A card an entry, its samples by column."""
    cards: dict[str, dict[str, Any]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            facts = {"address": gpu.address, "name": gpu.name, "time_s": [], **{name: [] for name in _COLUMNS}}
            card = cards.setdefault(gpu.address, facts)
            card["total_bytes"] = gpu.total_bytes
            card["time_s"].append(sample.time_s)
            for name in _COLUMNS:
                card[name].append(getattr(gpu, name))
    return list(cards.values())
