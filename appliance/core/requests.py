"""Requests as the appliance remembers them: lengths and fingerprints, never text."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Resumability(enum.Enum):
    """How a request may go on after the engine died under it."""

    REPLAY = "replay"
    """Nothing was sent to the client yet: the same body again."""
    CONTINUE = "continue"
    """Text was sent; the engine can go on from exactly there."""
    FAIL = "fail"
    """Text was sent and cannot be continued: the stream ends with an error that says so."""


@dataclass(frozen=True, slots=True)
class InflightRequest:
    """One request between its acceptance and its last byte.

    Attributes:
        request_id: ours, `req-...`; the client sees it as `x-request-id`.
        path: the endpoint, such as `/v1/chat/completions`.
        fingerprint: keyed hash of the body; equal bodies have equal fingerprints on this box only.
        body_bytes: length of the body as received.
        prompt_tokens: where known (the engine said it, or the gateway counted).
        sent_bytes: what the client has already been sent of the answer's body.
        stream: the client asked for server-sent events.
        generation: the engine life it was last given to; 0 while it waits.
        attempt: how often it was given to an engine, 1 for the first time.
        age_s: seconds since acceptance.
        resumability: what can be done if the engine dies now.
        replica: with an engine on each card, the index of the one that it was last given to (`Publication.replicas`); `generation` is then
            of that one. None: there is one engine, or it waits.
    """

    request_id: str
    path: str
    fingerprint: str
    body_bytes: int
    prompt_tokens: int | None
    sent_bytes: int
    stream: bool
    generation: int
    attempt: int
    age_s: float
    resumability: Resumability
    replica: int | None = None
