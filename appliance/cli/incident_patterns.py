"""`appliancectl incidents --patterns`: which crashes are one and the same, and what they share that healthy moments do not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.cli.printing import bold, faint, moment, say
from appliance.core.flight import FlightSample
from appliance.core.incident import Incident
from appliance.core.requests import InflightRequest
from appliance.diagnosis.recurrence import FEWEST_CRASHES, Features, Pattern, patterns, signature

HEALTHY_BEFORE_S = 10.0
"""What the flight recorder saw longer than this before a crash counts as healthy."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Crashes with one signature, newest first; an empty signature: nothing in them can be compared."""

    signature: str
    words: tuple[str, ...]
    incidents: tuple[Incident, ...]
    shared: tuple[Pattern, ...] = ()

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "signature": self.signature,
            "cause": self.incidents[0].diagnosis.cause.label,
            "parts": list(self.words),
            "count": len(self.incidents),
            "first_s": self.incidents[-1].time_s,
            "last_s": self.incidents[0].time_s,
            "incidents": [incident.incident_id for incident in self.incidents],
            "shared": [dataclasses.asdict(pattern) | {"sentence": pattern.sentence()} for pattern in self.shared],
        }


def kinds_of(incidents: Sequence[Incident]) -> list[Kind]:
    """The most frequent first. Healthy are the moments before any crash, and the requests that other crashes met."""
    groups: dict[tuple[str, tuple[str, ...]], list[Incident]] = {}
    for incident in sorted(incidents, key=lambda incident: -incident.time_s):
        found = signature(incident.diagnosis, incident.evidence)
        groups.setdefault(("", ()) if found is None else (found.value, found.parts), []).append(incident)
    healthy_load = [_load(incident, sample) for incident in incidents for sample in _healthy(incident)]
    kinds = []
    for (value, words), members in groups.items():
        strangers = [request for incident in incidents if incident not in members for request in incident.inflight]
        shared = (
            *patterns([_load(incident, sample) for incident in members for sample in _samples(incident)[-1:]], healthy_load),
            *patterns([{"card": _card_of(incident)} for incident in members if _card_of(incident)], _cards(incidents)),
            *patterns(_requests(members), [_request(request) for request in strangers]),
        )
        kinds.append(Kind(value, words, tuple(members), shared if value else ()))
    return sorted(kinds, key=lambda kind: (kind.signature == "", -len(kind.incidents), -kind.incidents[0].time_s))


def show(kinds: Sequence[Kind]) -> None:
    """For a person."""
    for kind in kinds:
        count = len(kind.incidents)
        last = moment(kind.incidents[0].time_s)
        times = "once" if count == 1 else f"{count} times"
        if not kind.signature:
            say(bold(f"{times}: no cause and no line to compare, the last at {last}"))
            continue
        say(bold(f"{times}: {kind.words[0]}, the last at {last} ({kind.incidents[0].incident_id})"))
        for words in kind.words[1:]:
            say(faint(f"  {words}"))
        for pattern in kind.shared:
            say(f"  {pattern.sentence()}")
        if count >= FEWEST_CRASHES and not kind.shared:
            say("  nothing in load or requests sets these crashes apart")
    say(faint(f"what crashes share is told from the {FEWEST_CRASHES}rd of a kind on"))


def _samples(incident: Incident) -> tuple[FlightSample, ...]:
    return () if incident.flight is None else incident.flight.samples


def _healthy(incident: Incident) -> Iterator[FlightSample]:
    """Seconds at work well before the crash."""
    for sample in _samples(incident):
        if sample.running and sample.time_s < incident.time_s - HEALTHY_BEFORE_S:
            yield sample


def _load(incident: Incident, sample: FlightSample) -> Features:
    """What was going on in that second, and in whose life."""
    age_s = sample.time_s - (incident.time_s - incident.uptime_s)
    life: dict[str, float | str] = {"engine": f"{incident.engine} {incident.engine_version}".strip(), "rung": incident.rung_before}
    if incident.flight is not None and incident.flight.driver:
        life["driver"] = incident.flight.driver
    if incident.uptime_s and age_s >= 0:  # an earlier life's second otherwise, whose beginning nobody has kept
        life["minutes since its start"] = age_s // 60
    return life | {
        "running": sample.running,
        "waiting": sample.waiting,
        "kv_blocks_used": sample.kv_blocks_used,
        "temperature_c": sample.temperature_c,
        "block_violations": sample.block_violations,
    }


def _card_of(incident: Incident) -> str:
    """The card that the kernel's lines which the verdict cites are about; empty where they name none, or several."""
    cited = {link.citation.text for link in incident.diagnosis.chain}
    named = {str(item.data["card"]) for item in incident.evidence if item.data.get("card") and item.text in cited}
    address = named.pop() if len(named) == 1 else ""
    seen = () if incident.flight is None else incident.flight.cards
    return next((card for card in seen if address and card.startswith(address)), address)


def _cards(incidents: Sequence[Incident]) -> list[Features]:
    """Every card that could have been it, once for each incident."""
    return [{"card": card} for incident in incidents if incident.flight is not None for card in incident.flight.cards]


def _request(request: InflightRequest) -> dict[str, float | str]:
    known: dict[str, float | str] = {"body_bytes": request.body_bytes, "path": request.path, "request": request.fingerprint}
    if request.prompt_tokens is not None:
        known["prompt_tokens"] = request.prompt_tokens
    return known


def _requests(members: Sequence[Incident]) -> list[Features]:
    """One row a crash: its longest request, and the request that most of these crashes met, where this one met it."""
    seen = Counter(fingerprint for incident in members for fingerprint in {request.fingerprint for request in incident.inflight})
    usual = seen.most_common(1)[0][0] if seen else ""
    rows: list[Features] = []
    for incident in members:
        if not incident.inflight:
            continue
        row = _request(max(incident.inflight, key=lambda request: (request.prompt_tokens or 0, request.body_bytes)))
        if any(request.fingerprint == usual for request in incident.inflight):
            row["request"] = usual
        rows.append(row)
    return rows
