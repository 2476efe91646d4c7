"""/metrics: every number under its name. docs/metrics.md says what each means; a test holds the two together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from appliance import __version__
from appliance.config.api_keys import PRIORITIES
from appliance.core.states import EngineState
from appliance.gateway.connection import ConnectionPolicy
from appliance.gateway.fallback import Fallback
from appliance.gateway.fuse import Fuse
from appliance.gateway.gate import Gate, Standing
from appliance.gateway.inflight import InflightTable
from appliance.gateway.metrics import Distribution, Metrics
from appliance.gateway.relay import Relay
from appliance.gateway.sources import Sources

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Reads the others; owns nothing."""

    def __init__(
        self,
        metrics: Metrics,
        fallback: Fallback,
        gate: Gate,
        relay: Relay,
        fuse: Fuse,
        inflight: InflightTable,
        policy: ConnectionPolicy,
        sources: Sources,
    ) -> None:
        self._metrics = metrics
        self._fallback = fallback
        self._gate = gate
        self._relay = relay
        self._fuse = fuse
        self._inflight = inflight
        self._policy = policy
        self._sources = sources

    async def page(self) -> bytes:
        """The text format."""
        families = [*_counted(self._metrics), *self._gauges(), *await self._sources.families()]
        outcomes = self._fallback.outcomes
        families.append(_counter("fallback_requests", "Requests for the fallback endpoint, by what became of them.", "outcome", outcomes))
        families.append(_counter("connections_cut", "Client connections cut off, by why.", "reason", self._policy.cut))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(families))
        ProcessCollector(namespace="appliance_gateway", registry=registry)
        return generate_latest(registry)

    def _gauges(self) -> Iterator[Metric]:
        view, slots, reads = self._gate.view, self._relay.slots, self._relay.reads
        publication = view.publication
        yield _gauge("up", "1 while requests go to the engine.", self._gate.standing is Standing.OPEN)
        yield _gauge("applianced_connected", "1 while applianced's control socket answers.", view.connected)
        yield _gauge("engine_generation", "Counts engine lives.", publication.generation if publication is not None else 0)
        states = GaugeMetricFamily("appliance_engine_state", "1 for the state the engine is in.", labels=("state",))
        for state in EngineState:
            states.add_metric((state.value,), float(publication is not None and state is publication.state))
        yield states
        yield _gauge("requests_in_flight", "Requests accepted and not answered to the end.", len(self._inflight))
        yield _gauge("queue_length", "Requests that wait for a slot or for the engine.", slots.queue_length + reads.queue_length)
        yield _gauge("slots_capacity", "Requests that the engine is given at once.", slots.capacity)
        yield _gauge("slots_in_use", "Requests that the engine has.", slots.in_use)
        yield _gauge("kv_tokens_pool", "Tokens that requests may reserve of the engine's KV pool; 0: not looked at.", slots.pool_tokens)
        yield _gauge("kv_tokens_reserved", "Tokens of prompts and answers that the engine may need for what it has.", slots.reserved_tokens)
        yield _gauge(
            "fused_lengths_learned", "Lengths of prompts that are refused though nobody has configured it.", len(self._fuse.learned)
        )
        yield _gauge("memory_red", "1 while a card is over the red line and long prompts go in alone.", self._relay.memory.over)
        yield _counter("memory_held_back", "Requests that had to wait for memory, by why.", "reason", self._relay.memory.held_back)
        yield _gauge("quarantined_requests", "Bodies that are refused because engines died of them.", len(self._relay.quarantine))
        waiting = GaugeMetricFamily("appliance_queue_priority_length", "Requests that wait for a slot, by class.", labels=("priority",))
        for priority, count in zip(PRIORITIES, slots.waiting_by_level(), strict=True):
            waiting.add_metric((priority,), count)
        yield waiting
        build = GaugeMetricFamily("appliance_build_info", "Always 1.", labels=("version",))
        build.add_metric((__version__,), 1.0)
        yield build


class _Once:
    """prometheus_client's collector interface over families that are there."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        return self._families


def _counted(metrics: Metrics) -> Iterator[Metric]:
    requests = CounterMetricFamily("appliance_requests", "Requests by path and status; 499: the client left.", labels=("endpoint", "code"))
    for (endpoint, code), count in sorted(metrics.requests.items()):
        requests.add_metric((endpoint, str(code)), count)
    yield requests
    yield _counter("refusals", "Requests that the gateway itself refused, by the code of the error.", "code", metrics.refusals)
    yield _counter("fuse_trips", "Prompts refused for their length, by the code of the error.", "code", metrics.fuse_trips)
    yield CounterMetricFamily(
        "appliance_lengths_learned",
        "Lengths of prompts that were found to kill engines, and are refused for a while.",
        metrics.learned_lengths,
    )
    yield _counter("prompts_altered", "Prompts altered for their length: padded or truncated.", "how", metrics.altered)
    yield _counter("upstream_losses", "Exchanges that lost their engine, by how.", "kind", metrics.lost)
    yield _counter("requests_resent", "Requests given to an engine again: from the start, or to go on with.", "how", metrics.resent)
    tokens = CounterMetricFamily(
        "appliance_tokens",
        "Tokens of prompts (in) and answers (out), as the engine counted or estimated.",
        labels=("direction", "known_by"),
    )
    for (direction, known_by), count in sorted(metrics.tokens.items()):
        tokens.add_metric((direction, known_by), count)
    yield tokens
    yield from _of_keys(metrics.of_key)
    for name, text, distribution in _histograms(metrics):
        yield histogram_family(name, text, distribution)


def _of_keys(of_key: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    requests = CounterMetricFamily("appliance_key_requests", "Requests answered, by API key.", labels=("key",))
    tokens = CounterMetricFamily(
        "appliance_key_tokens", "Tokens of prompts (in) and answers (out), by API key.", labels=("key", "direction")
    )
    for (key, what), count in sorted(of_key.items()):
        if what == "requests":
            requests.add_metric((key,), count)
        else:
            tokens.add_metric((key, what.removeprefix("tokens_")), count)
    yield requests
    yield tokens


def _histograms(metrics: Metrics) -> tuple[tuple[str, str, Distribution], ...]:
    return (
        ("time_to_first_token_seconds", "From a streamed request's last byte in to its first token out.", metrics.first_token),
        ("inter_token_latency_seconds", "Between two tokens of a stream.", metrics.inter_token),
        ("request_duration_seconds", "From a request's last byte in to its answer's last byte out.", metrics.duration),
        ("queue_wait_seconds", "How long a request waited before it was given to an engine.", metrics.queue_wait),
        ("prompt_count_seconds", "How long the engine took to count a prompt that may be too long.", metrics.count_time),
        ("prompt_tokens", "Length of the prompts that were answered.", metrics.prompt_length),
        ("answer_tokens", "Length of the answers.", metrics.answer_length),
    )


def histogram_family(name: str, text: str, distribution: Distribution) -> HistogramMetricFamily:
    """As Prometheus counts: cumulative, up to +Inf."""
    cumulated, buckets = 0, []
    for bound, count in zip((*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True):
        cumulated += count
        buckets.append((bound, cumulated))
    return HistogramMetricFamily(f"appliance_{name}", text, buckets=buckets, sum_value=distribution.total)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"appliance_{name}", text, value=float(value))


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"appliance_{name}", text, labels=(label,))
    for key, count in sorted(values.items()):
        family.add_metric((key,), count)
    return family
