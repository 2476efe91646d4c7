"""/status/events: all that the page shows, as server-sent events, for as long as somebody looks.

Events, each a JSON document, each with the moment as its id:
    hello      once: our version, whose key it is, whether it may press buttons
    now        every second and at every change: /status
    machine    applianced's own status, when it has changed
    ladder     the rungs, and why this one, when that has changed
    incidents  newest first, when there is a new one or one has ended
    flight     the flight recorder's samples that the client has not had
    series     the last day in steps of ten seconds, likewise

A client that comes back says with Last-Event-ID how far it had come. applianced is asked only while somebody looks, once a
second however many they are. Of a slow reader nothing is kept: it gets the newest when it has read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from appliance import __version__
from appliance.config.api_keys import ApiKey
from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.gateway.actions import Actions
from appliance.gateway.client import UNBUFFERED, Client
from appliance.gateway.connection import ConnectionPolicy
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers, value_of
from appliance.gateway.inflight import InflightTable
from appliance.gateway.recent import STEP_S, Recent
from appliance.gateway.relay import Relay

log = logging.getLogger("gateway.live")

PATH = "/status/events"
TICK_S = 1.0
CLOSE_TOGETHER_S = 0.05
"""Changes that follow each other so closely are shown as one."""
DEADLINE_S = 2.0
WATCHERS_MAX = 32
FLIGHT_S = 15 * 60.0
_PASSING = ("uptime_s", "state_for_s")
"""Of applianced's status: what changes all the time and is no news."""
_HEAD: Headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), UNBUFFERED]
Json = dict[str, Any]


class Live:
    """Owns what applianced said last, and the clock of those who look."""

    def __init__(
        self,
        control: AsyncControl,
        status: Callable[[], Json],
        recent: Recent,
        relay: Relay,
        inflight: InflightTable,
        actions: Actions,
        policy: ConnectionPolicy,
    ) -> None:
        self._control = control
        self._status = status
        self._recent = recent
        self._relay = relay
        self._inflight = inflight
        self._actions = actions
        self._policy = policy
        self._woken = asyncio.Event()
        self._ticked = asyncio.Event()
        self._watchers = 0
        self._said: dict[str, Json] = {}
        """Event → what applianced said last; a new object is news."""
        self._hint: tuple[object, ...] | None = None
        """Of when ladder and incidents were asked for last."""
        self._flights: dict[float, Json] = {}
        """Since when → samples, of this tick: most who look have had the same."""
        self._heard_s: float | None = None
        self._problem = "not asked yet"

    def wake(self) -> None:
        """Something has changed that people wait for."""
        self._woken.set()

    async def keep_series(self) -> None:
        """The steps of the last day, for ever, whether anybody looks or not."""
        while True:
            await asyncio.sleep(STEP_S - time.time() % STEP_S)
            slots = self._relay.slots
            self._recent.add(round(time.time() / STEP_S) * STEP_S, self._inflight, slots.in_use, slots.queue_length)

    async def keep_asking(self) -> None:
        """A tick a second while somebody looks, and at each wake."""
        while True:
            while not self._watchers:
                self._said.clear()
                self._hint = None
                self._woken.clear()
                await self._woken.wait()
            self._woken.clear()
            await self._ask()
            self._flights.clear()
            self._ticked.set()
            self._ticked = asyncio.Event()
            await asyncio.sleep(CLOSE_TOGETHER_S)
            try:
                async with asyncio.timeout(TICK_S - CLOSE_TOGETHER_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def serve(self, client: Client, headers: Headers, key: ApiKey) -> None:
        """One who looks, until they leave or the gateway stops. Raises Refused where too many do."""
        if self._watchers >= WATCHERS_MAX:
            raise Refused(
                503, "too_many_watchers", f"{WATCHERS_MAX} pages are open already, which is the limit", hint="close one", retry_after_s=5
            )
        after_s = _last_id(headers)
        reader = _Reader(after_s)
        self._watchers += 1
        try:
            await client.begin(200, _HEAD)
            hello = {"version": __version__, "key": key.name, "actions": self._actions.enabled, "admin": self._actions.allowed(key)}
            await client.write(_event("hello", hello))
            self.wake()
            while not self._policy.draining:
                await self._ticked.wait()
                await client.write(b"".join([*self._news(reader), *await self._samples(reader)]))
            await client.finish()
        finally:
            self._watchers -= 1

    def close(self) -> None:
        """Give up what is under way."""
        self._control.close()

    # inside

    async def _ask(self) -> None:
        """What applianced says now. The ladder and the incidents are asked for again when its status hints at news."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                status = await self._control.ask("status")
                self._hear("machine", status)
                hint = _hint_of(status)
                if hint != self._hint:
                    self._hear("ladder", await self._control.ask("ladder"))
                    self._hear("incidents", await self._control.ask("timeline"))
                    self._hint = hint
        except (ApplianceError, TimeoutError) as error:
            self._problem = str(error) or f"applianced gave no answer within {DEADLINE_S:g} s"
            self._hint = None
        else:
            self._heard_s, self._problem = time.time(), ""

    def _hear(self, event: str, said: Json) -> None:
        if _lasting(said) != _lasting(self._said.get(event, {})):
            self._said[event] = said

    def _news(self, reader: _Reader) -> Iterator[bytes]:
        yield _event("now", self._status() | {"time_s": time.time(), "applianced": {"heard_s": self._heard_s, "problem": self._problem}})
        for event, said in self._said.items():
            if reader.said.get(event) is not said:
                reader.said[event] = said
                yield _event(event, said)
        steps = [asdict(step) for step in self._recent.since(reader.series_s)]
        if steps:
            reader.series_s = steps[-1]["time_s"]
            yield _event("series", {"step_s": STEP_S, "steps": steps})

    async def _samples(self, reader: _Reader) -> list[bytes]:
        since_s = max(reader.flight_s, round(time.time() - FLIGHT_S, 0))
        found = self._flights.get(since_s)
        if found is None:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    found = self._flights[since_s] = await self._control.ask("flight", since_s=since_s)
            except (ApplianceError, TimeoutError) as error:
                log.debug("the flight recorder: %s", error)
                return []
        times = [*found["samples"]["time_s"][-1:], *(card["time_s"][-1] for card in found["cards"])]
        if not times:
            return []
        reader.flight_s = max(times)
        return [_event("flight", found)]


class _Reader:
    """How far one who looks has come."""

    def __init__(self, after_s: float) -> None:
        self.said: dict[str, Json] = {}
        self.series_s = self.flight_s = after_s


def _event(name: str, document: Json) -> bytes:
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"id: {time.time():.1f}\nevent: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def _last_id(headers: Headers) -> float:
    """What the client has already; what is no moment of the past means nothing."""
    try:
        after_s = float(value_of(headers, b"last-event-id") or 0)
    except ValueError:
        return 0.0
    return after_s if 0 < after_s <= time.time() else 0.0


def _lasting(said: Json) -> Json:
    return {name: value for name, value in said.items() if name not in _PASSING}


def _hint_of(status: Json) -> tuple[object, ...]:
    """What moves with the ladder and the incidents."""
    rung, last, proof = (_object(status, name) for name in ("rung", "last_incident", "proof"))
    moves = rung.get("index"), status.get("rungs"), status.get("generation")
    return *moves, last.get("incident_id"), last.get("recovered_s"), proof.get("time_s")


def _object(said: Json, name: str) -> Json:
    """One inside another; empty where an applianced of another version says something else."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}
