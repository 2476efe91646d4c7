"""What the control socket's verbs about an engine mean. Questions read the state; requests go through the loop like every other event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from appliance.control.codec import CodecError, inflight_from_json, inflight_to_json, rung_to_json, to_json
from appliance.control.server import Handler
from appliance.core.errors import ControlError
from appliance.core.printable import printable
from appliance.core.requests import InflightRequest
from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.crash_lengths import HEALTHY_MAX, FusedLength, crash_lengths, with_lengths
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.records import INCIDENTS_MAX, no_more
from appliance.supervisor.views import Views

REPORT_KINDS = ("traffic", "upstream_lost", "client_disconnect", "weighed")
REASON_MAX_CHARS = 300
WEIGHED_MAX = 20
"""Incidents back: engines may have died again before the prompts that one has met could be counted."""

log = structlog.get_logger()
Arguments = Mapping[str, Any]


class Verbs:
    """One method a verb."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.views = Views(supervisor)
        self._fused: tuple[FusedLength, ...] = ()
        """What the gateway was advised last."""

    @property
    def handlers(self) -> dict[str, Handler]:
        """For the control server."""
        verbs = (self.status, self.restart, self.drain, self.resume, self.report)
        return {verb.__name__: verb for verb in verbs} | self.views.handlers

    async def status(self, arguments: Arguments) -> Arguments:
        """All that is known without asking anybody."""
        no_more(arguments)
        supervisor = self._supervisor
        state = supervisor.state
        return {
            "state": state.state.value,
            "generation": state.generation,
            "sentence": state.sentence,
            "engine": supervisor.backend.name,
            "engine_version": supervisor.backend.version,
            "engine_pid": supervisor.life.pid if supervisor.life is not None else None,
            "model": supervisor.model_name,
            "rung": rung_to_json(state.rung),
            "rungs": len(state.ladder),
            "proof": supervisor.budget.status(supervisor.config, state.rung),
            "limits": to_json(state.limits),
            "restarts": state.restarts,
            "last_incident": supervisor.casework.last_incident,
            "uptime_s": round(time.monotonic() - supervisor.began_s, 3),
            "state_for_s": round(time.monotonic() - state.since_s, 3),
            "sensors": supervisor.sensors(),
            "xids": {str(number): count for number, count in sorted(supervisor.desk.xids.items())},
            "fused_lengths": to_json(self._fused),
            "subscribers": supervisor.board.subscribers,
        }

    async def restart(self, arguments: Arguments) -> Arguments:
        """A new engine life, on the same rung or on the one that is named."""
        no_more(arguments, "reason", "rung")
        self.check_rung(arguments)
        return await self._ask(ev.RestartRequested(_reason(arguments), arguments.get("rung")), "restarted")

    def check_rung(self, arguments: Arguments) -> None:
        """Raise ControlError where this engine has no such rung."""
        rung, rungs = arguments.get("rung"), len(self._supervisor.state.ladder)
        if rung is not None and (not isinstance(rung, int) or isinstance(rung, bool) or not 0 <= rung < rungs):
            raise ControlError(f"rung = {rung!r} is none of 0 to {rungs - 1}", hint="0 is what is configured, higher ones are safer")

    async def drain(self, arguments: Arguments) -> Arguments:
        """Finish what runs, stop the engine, wait for resume."""
        no_more(arguments, "reason")
        return await self._ask(ev.DrainRequested(_reason(arguments)), "drained")

    async def resume(self, arguments: Arguments) -> Arguments:
        """Leave PARKED."""
        no_more(arguments)
        answer = await self._ask(ev.ResumeRequested("appliancectl resume"), "resumed")
        if answer["state"] == EngineState.PARKED.value:
            raise ControlError(answer["sentence"])
        return answer

    async def report(self, arguments: Arguments) -> Arguments:
        """What the gateway has in flight; `weighed`: how long the prompts were that the last crash met, answered with what to refuse."""
        no_more(arguments, "kind", "requests", "lengths")
        kind, requests = arguments.get("kind", "traffic"), arguments.get("requests", [])
        if kind not in REPORT_KINDS:
            raise ControlError(f"kind = {kind!r} is none of {', '.join(REPORT_KINDS)}")
        if not isinstance(requests, list):
            raise CodecError(f"requests = {str(requests)[:80]!r} is no list")
        shapes = tuple(inflight_from_json(request) for request in requests)
        if kind == "weighed":
            return await self._weighed(shapes, arguments.get("lengths", []))
        self._supervisor.desk.add_report(kind, shapes)
        if kind == "upstream_lost":
            self._complete_incident(shapes)
        return {}

    def _complete_incident(self, shapes: Sequence[InflightRequest]) -> None:
        """The gateway notices a death when we do, and its report mostly comes after the incident was recorded."""
        incident = self._supervisor.casework.last_incident
        if incident is None or incident["inflight"]:
            return
        lost = [inflight_to_json(shape) for shape in shapes if shape.generation == incident["generation"]]
        if lost:
            incident["inflight"] = lost
            self._supervisor.store.amend(incident["incident_id"], inflight=lost)

    async def _weighed(self, shapes: Sequence[InflightRequest], healthy: object) -> Arguments:
        """Lengths that were counted after the crash complete its incident, and with the others may make a pattern."""
        if not isinstance(healthy, list) or len(healthy) > HEALTHY_MAX or not all(type(tokens) is int for tokens in healthy):
            raise CodecError(f"lengths = {str(healthy)[:80]!r} is no list of at most {HEALTHY_MAX} whole numbers")
        store, last = self._supervisor.store, self._supervisor.casework.last_incident
        known = {(shape.generation, shape.request_id): shape.prompt_tokens for shape in shapes}
        for incident in await asyncio.to_thread(store.recent, WEIGHED_MAX):
            counted = with_lengths(incident, known)
            if counted is not None:
                store.amend(incident["incident_id"], inflight=counted)
                if last is not None and last["incident_id"] == incident["incident_id"]:
                    last["inflight"] = counted
        # What a length does to one engine it does to all that run the model.
        self._fused = await asyncio.to_thread(lambda: crash_lengths(store.whole.recent(INCIDENTS_MAX), healthy, time.time()))
        return {"fused_lengths": to_json(self._fused)}

    async def _ask(self, event: ev.Event, done: str) -> Arguments:
        before, after = await self._supervisor.obey(event)
        log.info("asked on the control socket", request=type(event).__name__, state=before.state.value, after=after.state.value)
        if after is before:
            raise ControlError(f"the engine cannot be {done} now: {before.sentence}", hint="appliancectl status tells what is going on")
        return {"state": after.state.value, "sentence": after.sentence}


def _reason(arguments: Arguments) -> str:
    reason = arguments.get("reason") or "a person asked for it"
    if not isinstance(reason, str):
        raise ControlError(f"reason = {reason!r} is no text")
    return printable(reason[:REASON_MAX_CHARS])
