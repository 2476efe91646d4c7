"""Numbers that others have, fetched when somebody scrapes: the engine's own metrics, and what applianced says of itself.

Whoever does not answer in time is left out of that scrape. The engine's counters begin again with each life of it, as a
restarted process's do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.gateway import definitions as defined
from appliance.gateway.advisor import replica_of
from appliance.gateway.definitions import ENGINE_PREFIX, Definition
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.gate import Life
from appliance.gateway.upstream import UpstreamLost

log = logging.getLogger("gateway.sources")

DEADLINE_S = 1.0
KEPT_S = 1.0
"""Several who scrape at the same time cause one question."""
PAGE_MAX_BYTES = 2 * 1024**2
INCIDENTS_ASKED = 1000
FLIGHT_S = 5.0
"""Of the flight recorder, which has a sample a second, the last one of these."""


@dataclass(frozen=True, slots=True)
class Series:
    """One of our metrics, and what it is called elsewhere. Of several label sets, `fold` makes one number.

    Names are as the parser has them: of counters without `_total`.
    """

    ours: Definition
    theirs: tuple[str, ...]
    fold: Callable[[Iterable[float]], float] = sum


SERIES = (
    Series(defined.RUNNING_REQUESTS, ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")),
    Series(defined.WAITING_REQUESTS, ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")),
    Series(
        defined.KV_USED_RATIO,
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
        max,
    ),
    Series(defined.PROMPT_TOKENS, ("vllm:prompt_tokens", "sglang:prompt_tokens", "llamacpp:prompt_tokens")),
    Series(defined.GENERATED_TOKENS, ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")),
    Series(defined.PREEMPTIONS, ("vllm:num_preemptions",)),
)

_CARD_COLUMNS = (
    ("total_bytes", defined.GPU_MEMORY),
    ("used_bytes", defined.GPU_MEMORY_USED),
    ("power_w", defined.GPU_POWER),
    ("temperature_c", defined.GPU_TEMPERATURE),
    ("pcie_replays", defined.GPU_REPLAYS),
)


class Sources:
    """Asks both, at most once a second."""

    def __init__(self, doors: Doors, control: AsyncControl) -> None:
        self._doors = doors
        self._control = control
        self._asking: asyncio.Task[list[Metric]] | None = None
        self._asked_s = -KEPT_S
        self._causes: tuple[object, Counter[str]] = (None, Counter())

    async def families(self) -> list[Metric]:
        """What is known now."""
        now_s = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now_s - self._asked_s >= KEPT_S):
            self._asked_s = now_s
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return await asyncio.shield(self._asking)  # a scraper that leaves must not take the others' numbers with it

    def close(self) -> None:
        """Give up what is under way."""
        if self._asking is not None:
            self._asking.cancel()
        self._control.close()

    async def _ask(self) -> list[Metric]:
        lives = [gate.life for gate in self._doors.gates]
        *engines, applianced = await asyncio.gather(*(self._engine(life) for life in lives), self._applianced())
        if self._doors.several:
            return [*told_apart(engines), *applianced]
        return [*engines[0], *applianced]

    async def _engine(self, life: Life | None) -> list[Metric]:
        page = None
        if life is not None:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    page = await life.upstream.page("/metrics", PAGE_MAX_BYTES)
            except (UpstreamLost, Refused, TimeoutError) as error:
                log.debug("the engine's metrics: %s", error)
        families = [] if page is None else mapped(page)
        return [defined.ENGINE_METRICS_UP.of(page is not None), *families]

    async def _applianced(self) -> list[Metric]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                status = await self._control.ask("status")
                return [
                    *self._engines_of(status),
                    *_of_box(status),
                    *await self._cards(),
                    await self._incidents(status.get("last_incident")),
                ]
        except (ApplianceError, TimeoutError) as error:
            log.debug("applianced's status: %s", error)
            return []

    def _engines_of(self, status: dict[str, Any]) -> list[Metric]:
        """What applianced says of each engine."""
        if not self._doors.several:
            return list(_of_engine(status))
        return told_apart([list(_of_engine(replica_of(status, index))) for index in range(len(self._doors.gates))])

    async def _cards(self) -> list[Metric]:
        try:
            flight = await self._control.ask("flight", since_s=time.time() - FLIGHT_S)
        except ApplianceError as error:  # an applianced that has no such verb, before an upgrade is complete
            log.debug("applianced's flight recorder: %s", error)
            return []
        return list(_of_cards(flight.get("cards")))

    async def _incidents(self, last: object) -> Metric:
        """Asked again only when there is a new one."""
        newest = last.get("incident_id") if isinstance(last, dict) else last
        if newest != self._causes[0]:
            found = await self._control.ask("incidents", limit=INCIDENTS_ASKED) if newest else {}
            self._causes = newest, Counter(_cause(incident) for incident in found.get("incidents", []))
        return defined.INCIDENTS.by_one(self._causes[1])


def mapped(page: str) -> list[Metric]:
    """The families of an engine's page under our names; what is ours already goes through as it is."""
    try:
        found = {family.name: family for family in text_string_to_metric_families(page)}
    except ValueError as error:
        log.debug("the engine's metrics are not Prometheus' text: %s", error)
        return []
    families = [family for name, family in found.items() if name.startswith(ENGINE_PREFIX)]
    for series in SERIES:
        source = next((found[name] for name in series.theirs if name in found), None)
        if source is not None and source.samples and series.ours.family not in found:
            families.append(series.ours.of(series.fold(sample.value for sample in source.samples)))
    used, total = found.get("appliance_engine_kv_blocks_used"), found.get("appliance_engine_kv_blocks")
    if used is not None and total is not None and total.samples and total.samples[0].value and used.samples:
        families.append(defined.KV_USED_RATIO.of(used.samples[0].value / total.samples[0].value))
    return families


def told_apart(engines: Sequence[Sequence[Metric]]) -> list[Metric]:
    """The families of several engines as one list, each series with its engine's index."""
    together: dict[str, Metric] = {}
    for index, families in enumerate(engines):
        for family in families:
            into = together.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, defined.REPLICA: str(index)}))
    return list(together.values())


def _of_engine(status: dict[str, Any]) -> Iterable[Metric]:
    rung, rungs, restarts = status.get("rung"), status.get("rungs"), status.get("restarts")
    if isinstance(rung, dict) and isinstance(rung.get("index"), int):
        yield defined.ENGINE_RUNG.of(rung["index"])
        yield from _of_plan(rung.get("plan"))
    if isinstance(rungs, int):
        yield defined.ENGINE_RUNGS.of(rungs)
    if isinstance(restarts, int):
        yield defined.ENGINE_RESTARTS.of(restarts)


def _of_box(status: dict[str, Any]) -> Iterable[Metric]:
    xids = status.get("xids")
    if isinstance(xids, dict):
        yield defined.GPU_XIDS.by_one(xids)
    sensors = status.get("sensors")
    if isinstance(sensors, dict):
        yield defined.SENSOR_UP.by_one({name: isinstance(sensor, dict) and sensor.get("ok") is True for name, sensor in sensors.items()})


def _of_cards(cards: object) -> Iterable[Metric]:
    """The last sample of each card."""
    for column, definition in _CARD_COLUMNS:
        values: dict[str, float] = {}
        for card in cards if isinstance(cards, list) else []:
            value = card.get(column) if isinstance(card, dict) else None
            value = value[-1] if isinstance(value, list) and value else value
            if isinstance(value, int | float):
                values[str(card.get("address"))] = value
        if values:
            yield definition.by_one(values)


def _of_plan(plan: object) -> Iterable[Metric]:
    """The memory plan of the rung, a series a term."""
    if isinstance(plan, dict):
        terms = {name: value for name, value in plan.items() if name.endswith("_bytes") and isinstance(value, int)}
        yield defined.PLAN.by_one({name.removesuffix("_bytes"): value for name, value in terms.items()})


def _cause(incident: object) -> str:
    diagnosis = incident.get("diagnosis") if isinstance(incident, dict) else None
    cause = diagnosis.get("cause") if isinstance(diagnosis, dict) else None
    return cause if isinstance(cause, str) else "unknown"
