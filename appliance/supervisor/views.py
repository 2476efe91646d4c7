"""What is asked for to be looked at, beyond `status`: the ladder, the flight recorder, the incidents as anybody may read them.

Incidents are told here without secrets and without anything that could be of a prompt (diagnosis/redact.py): they are
shown in browsers, and whoever may use the model may look at them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.control.codec import diagnosis_from_json, evidence_from_json, rung_to_json, to_json
from appliance.core.errors import ControlError
from appliance.diagnosis import incident_report
from appliance.diagnosis.bundle import redacted, write_bundle
from appliance.diagnosis.redact import Redactor
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.flight_recorder import CardsSample
from appliance.supervisor.machine import MachineState

TOLD_MAX = 200
BUNDLE_MAX_BYTES = 5 * 1024**2
"""As base64 it has to go into a frame of the control socket."""
_OF_THE_BOX = ("driver", "cards")
"""Of a flight record, for incidents: no columns of samples, and `cards` tells more."""
_COLUMNS = ("used_bytes", "power_w", "temperature_c", "pcie_generation", "pcie_width", "pcie_replays")
_KEPT = ("incident_id", "time_s", "generation", "engine", "engine_version", "model", "phase", "uptime_s", "recovered_s")
Document = Mapping[str, Any]


class Views:
    """Reads the supervisor; changes nothing."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def ladder(self, arguments: Document) -> Document:
        """Every rung, which is in force, and why that one; what starts of this engine measured."""
        _no_more(arguments)
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
        _no_more(arguments, "since_s")
        since_s = arguments.get("since_s", 0)
        if not isinstance(since_s, (int, float)) or isinstance(since_s, bool):
            raise ControlError(f"since_s = {since_s!r} is no number of seconds")
        samples, cards = self._supervisor.flight.since(float(since_s))
        config, rung = self._supervisor.config, self._supervisor.state.rung
        block_tokens = config.engine.block_tokens if config.engine.backend == "native" else rung.block_tokens
        columns = {name: column for name, column in to_json(samples).items() if name not in _OF_THE_BOX}
        return {"samples": columns, "cards": by_card(cards), "block_tokens": block_tokens}

    async def timeline(self, arguments: Document) -> Document:
        """The incidents, newest first, without evidence and without secrets."""
        _no_more(arguments, "limit")
        limit = arguments.get("limit", 50)
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= TOLD_MAX:
            raise ControlError(f"limit = {limit!r} is no number from 1 to {TOLD_MAX}")
        return {"incidents": await asyncio.to_thread(lambda: [told(one) for one in self._supervisor.store.recent(limit)])}

    async def dossier(self, arguments: Document) -> Document:
        """One incident as Markdown; with `bundle` also as the file that `diagnose --bundle` writes, in base64."""
        _no_more(arguments, "id", "bundle")
        incident_id, bundle = arguments.get("id"), arguments.get("bundle", False)
        if not isinstance(incident_id, str) or not incident_id:
            raise ControlError(f"id = {incident_id!r} names no incident")
        document = await asyncio.to_thread(self._supervisor.store.one, incident_id)
        if document is None:
            raise ControlError(f"no incident {incident_id[:80]!r} on this box", hint="appliancectl incidents lists what there is")
        answer = {"markdown": await asyncio.to_thread(markdown_of, document)}
        return answer | {"bundle": await asyncio.to_thread(bundle_of, document)} if bundle is True else answer


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


def told(incident: Document) -> Document:
    """An incident as anybody may read it."""
    redactor = Redactor()
    return {
        **{name: incident[name] for name in (*_KEPT, "rung_before", "rung_after")},
        "diagnosis": to_json(redacted(diagnosis_from_json(incident["diagnosis"]), redactor)),
        "action": {"kind": incident["action"]["kind"], "basis": incident_report.basis(incident, redactor)},
        "requests": len(incident["inflight"]),
    }


def markdown_of(incident: Document) -> str:
    """The report to paste into an issue."""
    redactor = Redactor()
    verdict = redacted(diagnosis_from_json(incident["diagnosis"]), redactor)
    return incident_report.markdown(incident, verdict, redactor)


def bundle_of(incident: Document) -> str:
    """Report and evidence without secrets, as base64 of a tar.zst.

    Raises:
        ControlError: it is too large for the control socket.
    """
    out = io.BytesIO()
    evidence = [evidence_from_json(item) for item in incident["evidence"]]
    write_bundle(out, diagnosis_from_json(incident["diagnosis"]), evidence, now_s=time.time(), incident=incident)
    if out.tell() > BUNDLE_MAX_BYTES:
        command = f"appliancectl diagnose --incident {incident['incident_id']} --bundle OUT.tar.zst"
        raise ControlError(
            f"the bundle has {out.tell()} bytes, and {BUNDLE_MAX_BYTES} is the most that can be handed on", hint=f"run: {command}"
        )
    return base64.b64encode(out.getvalue()).decode("ascii")


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


def _no_more(arguments: Document, *known: str) -> None:
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ControlError(f"unknown argument {unknown[0]!r}", hint=f"known: {', '.join(known) or 'none'}")
