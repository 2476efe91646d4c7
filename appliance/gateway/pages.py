"""The gateway's own pages: /health, /status, /metrics, /."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from appliance import __version__
from appliance.config import Config
from appliance.config.api_keys import PRIORITIES, ApiKey
from appliance.control.client import AsyncControl
from appliance.control.codec import to_json
from appliance.gateway import page_files
from appliance.gateway.admission import Lane
from appliance.gateway.connection import ConnectionPolicy
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import JSON_TYPE, Refused
from appliance.gateway.exposition import CONTENT_TYPE, Exposition
from appliance.gateway.fuse import Fuse
from appliance.gateway.gate import Gate, Standing
from appliance.gateway.headers import Headers
from appliance.gateway.incident_page import incident_page
from appliance.gateway.inflight import InflightTable
from appliance.gateway.metrics import Metrics
from appliance.gateway.relay import Relay
from appliance.gateway.restrictions import held_back, restrictions

LISTED_MAX = 100
ASKED_S = 1.0
"""So long a first question of all waits for applianced's first word: with socket activation it is what starts the gateway."""
Page = tuple[int, Headers, bytes]


class Pages:
    """Reads the others; owns nothing."""

    def __init__(
        self,
        config: Config,
        doors: Doors,
        relay: Relay,
        fuse: Fuse,
        inflight: InflightTable,
        metrics: Metrics,
        policy: ConnectionPolicy,
        exposition: Exposition,
        control: AsyncControl,
    ) -> None:
        self._config = config
        self._doors = doors
        self._relay = relay
        self._fuse = fuse
        self._inflight = inflight
        self._metrics = metrics
        self._policy = policy
        self._exposition = exposition
        self._control = control
        self._started_s = time.monotonic()

    async def get(self, path: str, query: bytes, headers: Headers, key: ApiKey) -> Page:
        """The page. Raises Refused for /health while nothing serves, for /metrics where it is switched off, for no such incident."""
        if path != page_files.FRONT and (file := page_files.FILES.get(path)) is not None:
            return file.answer(headers)
        await self._doors.asked(ASKED_S)
        if path == "/health":
            return self._health()
        if path == "/status":
            return 200, [JSON_TYPE, (b"cache-control", b"no-store")], _json(self.status())
        if path == "/metrics":
            return await self._metrics_page()
        if path.startswith("/status/incident."):
            return await incident_page(self._control, path, query, key)
        if page_files.wants_page(headers):
            return page_files.FILES[page_files.FRONT].answer(headers)
        return 200, [(b"content-type", b"text/plain; charset=utf-8")], self._front().encode()

    def status(self) -> dict[str, Any]:
        """All that a person, a dashboard or a router in front may want to know."""
        doors, slots, admission = self._doors, self._relay.slots, self._config.admission
        memories = [room.memory for room in slots.rooms]
        over = "; ".join(memory.sentence for memory in memories if memory.sentence)
        return {
            "standing": doors.standing.value,
            "sentence": "; ".join(filter(None, (doors.sentence, over, self._fuse.sentence))),
            "applianced_connected": doors.connected,
            "publication": to_json(doors.publication),
            "engines": [self._engine(index, gate) for index, gate in enumerate(doors.gates)] if doors.several else [],
            "slots": {"capacity": slots.capacity, "in_use": slots.in_use, "holding": self._holding()},
            "kv_tokens": {"pool": slots.pool_tokens, "reserved": slots.reserved_tokens},
            "memory": {"over": any(memory.over for memory in memories), "sentence": over, "held_back": dict(held_back(memories))},
            "fused_lengths": {
                "configured": list(admission.fused_lengths),
                "learned": [{"tokens": tokens, "why": why} for tokens, why in sorted(self._fuse.learned.items())],
            },
            "restrictions": restrictions(memories, admission.length_policy, admission.fused_lengths, self._fuse.learned),
            "queue": self._queue(slots),
            "inflight": to_json(self._inflight.all()[:LISTED_MAX]),
            "totals": {
                "requests": {str(code): count for code, count in sorted(self._by_code().items())},
                "upstream_losses": dict(self._metrics.lost),
                "resent": self._metrics.resent.total(),
                "connections_cut": dict(self._policy.cut),
            },
            "draining": self._policy.draining,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "version": __version__,
        }

    def _health(self) -> Page:
        if self._doors.standing is not Standing.OPEN:
            raise self._doors.refusal()
        if self._policy.draining:
            raise Refused(503, "gateway_draining", "the gateway finishes what runs and stops", retry_after_s=5)
        publication = self._doors.publication
        assert publication is not None
        return 200, [JSON_TYPE], _json({"status": "ok", "state": publication.state.value, "sentence": self._doors.sentence})

    async def _metrics_page(self) -> Page:
        if not self._config.metrics.enabled:
            raise Refused(404, "metrics_off", "metrics are switched off", hint="set [metrics] enabled = true")
        return 200, [(b"content-type", CONTENT_TYPE)], await self._exposition.page()

    def _front(self) -> str:
        return (
            f"LLM appliance {__version__}\n\n{self._doors.sentence}\n\n"
            "POST /v1/chat/completions, /v1/completions    GET /v1/models\n"
            "GET /health, /status, /metrics\n"
        )

    def _engine(self, index: int, gate: Gate) -> dict[str, Any]:
        """One of several: what goes to it, and how it is."""
        room, publication = self._relay.slots.rooms[index], gate.view.publication
        return {
            "replica": index,
            "standing": gate.standing.value,
            "state": publication.state.value if publication is not None else None,
            "generation": publication.generation if publication is not None else 0,
            "sentence": gate.sentence,
            "slots": {"capacity": room.space.capacity, "in_use": room.in_use},
            "kv_tokens": {"pool": room.space.pool_tokens, "reserved": room.reserved_tokens},
            "memory": {"over": room.memory.over, "sentence": room.memory.sentence},
            "tried_alone": self._relay.trials.closes == index,
        }

    def _queue(self, lane: Lane) -> dict[str, Any]:
        now_s = asyncio.get_running_loop().time()
        waiting = [
            {
                "request_id": waiter.ticket.request_id,
                "key": waiter.ticket.flow,
                "priority": PRIORITIES[waiter.ticket.level],
                "tokens": waiter.ticket.tokens,
                "position": position,
                "waited_s": round(now_s - waiter.since_s, 3),
                "estimated_wait_s": _rounded(lane.estimated_wait_s(position)),
            }
            for position, waiter in enumerate(lane.waiting()[:LISTED_MAX])
        ]
        return {"length": lane.queue_length, "limit": lane.queue_size, "waiting": waiting}

    def _holding(self) -> list[dict[str, Any]]:
        """Who has a slot: how long, how far, and how long silent. Never a text."""
        now_s = asyncio.get_running_loop().time()
        held = sorted((one for one in self._inflight if one.generation and one.takes_slot), key=lambda one: one.order)
        return [
            {
                "request_id": one.request_id,
                "key": one.ticket.flow,
                "path": one.path,
                "prompt_tokens": one.prompt_tokens,
                "tokens": one.tokens,
                "age_s": round(now_s - one.arrived_s, 3),
                "last_token_s": _rounded(now_s - one.account.last_s if one.account is not None and one.account.last_s else None),
                "stream": one.stream,
                "attempt": one.attempt,
                "generation": one.generation,
                "replica": one.life.replica if one.life is not None else None,
            }
            for one in held[:LISTED_MAX]
        ]

    def _by_code(self) -> dict[int, int]:
        totals: dict[int, int] = {}
        for (_, code), count in self._metrics.requests.items():
            totals[code] = totals.get(code, 0) + count
        return totals


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")


def _rounded(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 3)
