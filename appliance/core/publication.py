"""What applianced tells the gateway, each time it changes."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.launch import Endpoint, EngineLimits
from appliance.core.states import EngineState


@dataclass(frozen=True, slots=True)
class Publication:
    """The engine as clients may know it; with an engine on each card, all of them summed up, so that who reads no further still works.

    Attributes:
        state: where it stands.
        generation: counts engine lives from 1; an answer of generation g is void once g+1 is published.
        endpoint: set only while state is SERVING or DEGRADED (or DRAINING, for what runs).
        limits: of the running engine, None while there is none.
        reason: one sentence for people, the same as in `systemctl status`.
        retry_after_s: how long a refused client should wait; None when a person is needed.
        incident_id: of the incident that the sentence speaks of, if one.
        replicas: with an engine on each card, each one's own, by card, always as many and in the same order; their generations
            count apart. Empty with one engine.
    """

    state: EngineState
    generation: int
    endpoint: Endpoint | None
    limits: EngineLimits | None
    reason: str
    retry_after_s: float | None
    incident_id: str | None = None
    replicas: tuple[Publication, ...] = ()
