"""Incidents: what is kept of a crash."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.action import Action
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence
from appliance.core.flight import FlightRecord
from appliance.core.requests import InflightRequest


@dataclass(frozen=True, slots=True)
class Incident:
    """One crash, from its first evidence to the first token served after it.

    Attributes:
        incident_id: `inc-YYYYMMDD-HHMMSS-xxxx`, sortable by time.
        time_s: of the first fatal evidence, seconds since the epoch.
        generation: the engine life that ended.
        engine, engine_version, model: what ran.
        phase: "start" before the first successful proof, "serving" after it.
        evidence: the lines and facts that the verdict stands on (a window, not the whole log).
        rung_before, rung_after: indices on the ladder.
        inflight: lengths and fingerprints of what was being served; never text.
        flight: the last minutes before it, a sample a second.
        card: PCI address of the card whose engine it was, with an engine on each card; empty with one engine.
        recovered_s: seconds from `time_s` to the next SERVING, of a later applianced too; None while there was none.
    """

    incident_id: str
    time_s: float
    generation: int
    engine: str
    engine_version: str
    model: str
    phase: str
    diagnosis: Diagnosis
    action: Action
    evidence: tuple[Evidence, ...] = ()
    rung_before: int = 0
    rung_after: int = 0
    inflight: tuple[InflightRequest, ...] = ()
    uptime_s: float = 0.0
    recovered_s: float | None = None
    flight: FlightRecord | None = None
    card: str = ""
