"""The record of crashes as it is asked for on the control socket: whole for the owner, and as anybody may read it.

What is shown in browsers is told without secrets and without anything that could be of a prompt (diagnosis/redact.py): whoever may use the
model may look at it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Mapping
from typing import Any

from appliance.control.codec import diagnosis_from_json, evidence_from_json, to_json
from appliance.control.server import Handler
from appliance.core.errors import ControlError
from appliance.diagnosis import incident_report
from appliance.diagnosis.bundle import redacted, write_bundle
from appliance.diagnosis.redact import Redactor
from appliance.supervisor.incidents import IncidentStore

INCIDENTS_MAX = 1000
TOLD_MAX = 200
BUNDLE_MAX_BYTES = 5 * 1024**2
"""As base64 it has to go into a frame of the control socket."""
_KEPT = ("incident_id", "time_s", "generation", "engine", "engine_version", "model", "phase", "uptime_s", "recovered_s")
Document = Mapping[str, Any]


class Records:
    """Reads the store of the box; one method a verb."""

    def __init__(self, store: IncidentStore) -> None:
        self._store = store

    @property
    def handlers(self) -> dict[str, Handler]:
        """For the control server."""
        return {verb.__name__: verb for verb in (self.incidents, self.incident, self.timeline, self.dossier)}

    async def incidents(self, arguments: Document) -> Document:
        """Newest first."""
        no_more(arguments, "limit")
        limit = arguments.get("limit", 20)
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= INCIDENTS_MAX:
            raise ControlError(f"limit = {limit!r} is no number from 1 to {INCIDENTS_MAX}")
        return {"incidents": await asyncio.to_thread(self._store.recent, limit)}

    async def incident(self, arguments: Document) -> Document:
        """Whole."""
        no_more(arguments, "id")
        incident_id = arguments.get("id") or ""
        if not isinstance(incident_id, str):
            raise ControlError(f"id = {incident_id!r} is no text")
        document = await asyncio.to_thread(self._store.one, incident_id)
        if document is None:
            what = f"no incident {incident_id!r}" if incident_id else "no incident yet"
            raise ControlError(f"{what} on this box", hint="appliancectl incidents lists what there is")
        return {"incident": document}

    async def timeline(self, arguments: Document) -> Document:
        """The incidents, newest first, without evidence and without secrets."""
        no_more(arguments, "limit")
        limit = arguments.get("limit", 50)
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= TOLD_MAX:
            raise ControlError(f"limit = {limit!r} is no number from 1 to {TOLD_MAX}")
        return {"incidents": await asyncio.to_thread(lambda: [told(one) for one in self._store.recent(limit)])}

    async def dossier(self, arguments: Document) -> Document:
        """One incident as Markdown; with `bundle` also as the file that `diagnose --bundle` writes, in base64."""
        no_more(arguments, "id", "bundle")
        incident_id, bundle = arguments.get("id"), arguments.get("bundle", False)
        if not isinstance(incident_id, str) or not incident_id:
            raise ControlError(f"id = {incident_id!r} names no incident")
        document = await asyncio.to_thread(self._store.one, incident_id)
        if document is None:
            raise ControlError(f"no incident {incident_id[:80]!r} on this box", hint="appliancectl incidents lists what there is")
        answer = {"markdown": await asyncio.to_thread(markdown_of, document)}
        return answer | {"bundle": await asyncio.to_thread(bundle_of, document)} if bundle is True else answer


def told(incident: Document) -> Document:
    """An incident as anybody may read it."""
    redactor = Redactor()
    return {
        **{name: incident[name] for name in (*_KEPT, "rung_before", "rung_after")},
        "card": incident.get("card", ""),
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


def no_more(arguments: Document, *known: str) -> None:
    """Raise ControlError for an argument that the verb does not have."""
    unknown = sorted(set(arguments) - set(known))
    if unknown == ["replica"]:
        raise ControlError("this is of the whole box, and no replica's; or there is one engine", hint="leave the number out")
    if unknown:
        raise ControlError(f"unknown argument {unknown[0]!r}", hint=f"known: {', '.join(known) or 'none'}")
