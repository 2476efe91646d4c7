"""An incident as a text that can be passed on: whose it is at its head, the verdict, what was done about it. Without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance import __version__
from appliance.core.diagnosis import Diagnosis
from appliance.core.units import format_duration
from appliance.diagnosis import report
from appliance.diagnosis.redact import Redactor

LISTED_MAX = 8
"""Requests in flight that are told one by one."""
Document = Mapping[str, Any]
"""An Incident as JSON (control/codec.py), whole or as a page is told it: then it has `requests`, their number, alone."""


def markdown(incident: Document, verdict: Diagnosis, redactor: Redactor, found: Sequence[str] = ()) -> str:
    """The report to paste into an issue. `verdict` and `found` have been through the redactor."""
    what = f"{incident['engine']} {incident['engine_version']}".strip()
    title = f"# {incident['incident_id']}: {what} with {incident['model']}"
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts(incident)]
    body = report.markdown(verdict, found).rstrip("\n")
    return "\n".join([title, "", "| | |", "|---|---|", *rows, "", body, "", done(incident, redactor)]) + "\n"


def facts(incident: Document) -> Iterator[tuple[str, str]]:
    """What anybody who reads a report asks first."""
    yield "when", str(report.moment(incident["time_s"]))
    yield "engine", f"{incident['engine']} {incident['engine_version']}".strip()
    yield "model", str(incident["model"])
    if incident.get("card"):
        yield "card", str(incident["card"])
    yield "appliance", __version__
    yield "generation", f"{incident['generation']}, {phase(incident)}"
    before, after = incident["rung_before"], incident["rung_after"]
    yield "rung", str(before) if before == after else f"{before}, then {after}"
    yield "in flight", _inflight(incident)


def phase(incident: Document) -> str:
    """How far that life had come."""
    return "while starting" if incident["phase"] == "start" else f"after {format_duration(incident['uptime_s'])} of service"


def counted(incident: Document) -> str:
    """How many requests it took with it."""
    count = len(incident["inflight"]) if "inflight" in incident else incident["requests"]
    return f"{count or 'no'} {'request' if count == 1 else 'requests'}"


def _inflight(incident: Document) -> str:
    """Their number and, where they are known, their lengths; never a text."""
    shapes = [_shape(request) for request in incident.get("inflight", ())[:LISTED_MAX]]
    more = len(incident.get("inflight", ())) - len(shapes)
    told = "; ".join([*shapes, *([f"{more} more"] if more > 0 else [])])
    return f"{counted(incident)}: {told}" if told else counted(incident)


def _shape(request: Document) -> str:
    tokens = request.get("prompt_tokens")
    prompt = f"a prompt of {tokens} tokens" if tokens is not None else f"a body of {request['body_bytes']} bytes"
    return f"{request['path']} with {prompt}, attempt {request['attempt']}, {format_duration(request['age_s'])} old"


def done(incident: Document, redactor: Redactor | None = None) -> str:
    """What the appliance did, and how long it took."""
    recovered_s = incident["recovered_s"]
    back = "not serving again yet" if recovered_s is None else f"serving again after {format_duration(recovered_s)}"
    return f"The appliance {basis(incident, redactor)}; {back}."


def basis(incident: Document, redactor: Redactor | None = None) -> str:
    """ "did X because Y (evidence Z)": X is in our own words, which are no secrets even where they look like some ("token: prompts")."""
    words = str(incident["action"]["basis"])
    if redactor is None:
        return words
    did, because, reason = words.partition(" because ")
    return did + redactor.redact(because + reason)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
