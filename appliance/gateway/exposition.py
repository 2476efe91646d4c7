"""/metrics: the values of what definitions.py defines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from appliance import __version__
from appliance.config.api_keys import PRIORITIES
from appliance.core.states import EngineState
from appliance.gateway import definitions as defined
from appliance.gateway.connection import ConnectionPolicy
from appliance.gateway.doors import Doors
from appliance.gateway.fallback import Fallback
from appliance.gateway.fuse import Fuse
from appliance.gateway.gate import Standing
from appliance.gateway.inflight import InflightTable
from appliance.gateway.metrics import Metrics
from appliance.gateway.relay import Relay
from appliance.gateway.restrictions import held_back
from appliance.gateway.sources import Sources

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Reads the others; owns nothing."""

    def __init__(
        self,
        metrics: Metrics,
        fallback: Fallback,
        doors: Doors,
        relay: Relay,
        fuse: Fuse,
        inflight: InflightTable,
        policy: ConnectionPolicy,
        sources: Sources,
    ) -> None:
        self._metrics = metrics
        self._fallback = fallback
        self._doors = doors
        self._relay = relay
        self._fuse = fuse
        self._inflight = inflight
        self._policy = policy
        self._sources = sources

    async def page(self) -> bytes:
        """The text format."""
        families = [*_counted(self._metrics), *self._gauges(), *await self._sources.families()]
        families.append(defined.FALLBACK_REQUESTS.by_one(self._fallback.outcomes))
        families.append(defined.CONNECTIONS_CUT.by_one(self._policy.cut))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(families))
        ProcessCollector(namespace="appliance_gateway", registry=registry)
        return generate_latest(registry)

    def _gauges(self) -> Iterator[Metric]:
        doors, slots, reads, publication = self._doors, self._relay.slots, self._relay.reads, self._doors.publication
        memories = [room.memory for room in slots.rooms]
        yield defined.UP.of(doors.standing is Standing.OPEN)
        yield defined.APPLIANCED_CONNECTED.of(doors.connected)
        yield defined.ENGINE_GENERATION.of(publication.generation if publication is not None else 0)
        state = publication.state if publication is not None else None
        yield defined.ENGINE_STATE.by({(each.value,): each is state for each in EngineState})
        yield defined.REQUESTS_IN_FLIGHT.of(len(self._inflight))
        yield defined.QUEUE_LENGTH.of(slots.queue_length + reads.queue_length)
        yield defined.QUEUE_PRIORITY_LENGTH.by({(level,): count for level, count in zip(PRIORITIES, slots.waiting_by_level(), strict=True)})
        yield defined.SLOTS_CAPACITY.of(slots.capacity)
        yield defined.SLOTS_IN_USE.of(slots.in_use)
        yield defined.KV_TOKENS_POOL.of(slots.pool_tokens)
        yield defined.KV_TOKENS_RESERVED.of(slots.reserved_tokens)
        yield defined.FUSED_LENGTHS_LEARNED.of(len(self._fuse.learned))
        yield defined.MEMORY_RED.of(any(memory.over for memory in memories))
        yield defined.MEMORY_HELD_BACK.by_one(held_back(memories))
        yield defined.QUARANTINED.of(len(self._relay.quarantine))
        yield defined.BUILD_INFO.by_one({__version__: 1})
        yield from self._replicas()

    def _replicas(self) -> Iterator[Metric]:
        """Of several engines, each."""
        gates = list(enumerate(self._doors.gates)) if self._doors.several else []
        rooms = self._relay.slots.rooms
        yield defined.REPLICA_UP.by({(str(index),): gate.standing is Standing.OPEN for index, gate in gates})
        known = [(str(index), gate.view.publication) for index, gate in gates]
        yield defined.REPLICA_GENERATION.by({(index,): said.generation for index, said in known if said is not None})
        yield defined.REPLICA_SLOTS_CAPACITY.by({(str(index),): rooms[index].space.capacity for index, _ in gates})
        yield defined.REPLICA_SLOTS_IN_USE.by({(str(index),): rooms[index].in_use for index, _ in gates})
        yield defined.REPLICA_KV_TOKENS_RESERVED.by({(str(index),): rooms[index].reserved_tokens for index, _ in gates})


class _Once:
    """prometheus_client's collector interface over families that are there."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        return self._families


def _counted(metrics: Metrics) -> Iterator[Metric]:
    yield defined.REQUESTS.by({(endpoint, str(code)): count for (endpoint, code), count in sorted(metrics.requests.items())})
    yield defined.REFUSALS.by_one(metrics.refusals)
    yield defined.FUSE_TRIPS.by_one(metrics.fuse_trips)
    yield defined.LENGTHS_LEARNED.of(metrics.learned_lengths)
    yield defined.PROMPTS_ALTERED.by_one(metrics.altered)
    yield defined.UPSTREAM_LOSSES.by_one(metrics.lost)
    yield defined.REQUESTS_RESENT.by_one(metrics.resent)
    yield defined.TOKENS.by(dict(sorted(metrics.tokens.items())))
    of_key = sorted(metrics.of_key.items())
    yield defined.KEY_REQUESTS.by({(key,): count for (key, what), count in of_key if what == "requests"})
    yield defined.KEY_TOKENS.by({(key, what.removeprefix("tokens_")): count for (key, what), count in of_key if what != "requests"})
    yield defined.FIRST_TOKEN.spread(metrics.first_token)
    yield defined.INTER_TOKEN.spread(metrics.inter_token)
    yield defined.DURATION.spread(metrics.duration)
    yield defined.QUEUE_WAIT.spread(metrics.queue_wait)
    yield defined.COUNT_TIME.spread(metrics.count_time)
    yield defined.PROMPT_LENGTH.spread(metrics.prompt_length)
    yield defined.ANSWER_LENGTH.spread(metrics.answer_length)
