"""Every metric that the gateway serves: name, type, labels and what it says. Nowhere else; docs/metrics.md is written from this.

What an engine names `appliance_engine_*` itself goes through as it is (the built-in one: appliance/engine/api/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from appliance.gateway.metrics import Distribution


class Kind(Enum):
    """Prometheus' types, as far as they are used."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    Attributes:
        family: its name without the `_total` of a counter.
        text: for people who read the scrape or the documentation.
        labels: what its series are told apart by.
    """

    family: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As it is served."""
        return f"{self.family}_total" if self.kind is Kind.COUNTER else self.family

    def of(self, value: float) -> Metric:
        """The one series of a metric without labels."""
        return self.by({(): value})

    def by(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """A series for each of these values of its labels, in their order; none is a metric that has nothing to say yet."""
        make = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(self.family, self.text, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, float(value))
        return family

    def by_one(self, values: Mapping[str, float]) -> Metric:
        """The same where there is one label; sorted."""
        return self.by({(label,): value for label, value in sorted(values.items())})

    def spread(self, distribution: Distribution) -> Metric:
        """A histogram as Prometheus counts: cumulative, up to +Inf."""
        cumulated, buckets = 0, []
        for bound, count in zip((*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True):
            cumulated += count
            buckets.append((bound, cumulated))
        return HistogramMetricFamily(self.family, self.text, buckets=buckets, sum_value=distribution.total)


class Group:
    """Metrics that have one source, in the order in which they are read."""

    def __init__(self, prefix: str = "appliance_") -> None:
        self._prefix = prefix
        self.metrics: list[Definition] = []

    def gauge(self, name: str, text: str, *labels: str) -> Definition:
        """What goes up and down."""
        return self._defined(name, Kind.GAUGE, text, labels)

    def counter(self, name: str, text: str, *labels: str) -> Definition:
        """What only grows; `name` is without `_total`."""
        return self._defined(name, Kind.COUNTER, text, labels)

    def histogram(self, name: str, text: str) -> Definition:
        """What is spread over buckets."""
        return self._defined(name, Kind.HISTOGRAM, text, ())

    def _defined(self, name: str, kind: Kind, text: str, labels: Iterable[str]) -> Definition:
        self.metrics.append(Definition(self._prefix + name, kind, text, tuple(labels)))
        return self.metrics[-1]


ENGINE_PREFIX = "appliance_engine_"

GATEWAY = Group()
UP = GATEWAY.gauge("up", "1 while requests go to the engine.")
REQUESTS = GATEWAY.counter(
    "requests", "Requests by path and status; 499: the client left; for an error inside a stream, the error's status.", "endpoint", "code"
)
REFUSALS = GATEWAY.counter(
    "refusals",
    "Requests that the gateway itself refused, by the code of the error (docs/gateway.md): queue_full, engine_parked, invalid_api_key, ...",
    "code",
)
FUSE_TRIPS = GATEWAY.counter(
    "fuse_trips", "Prompts refused for their length, by the code of the error: context_length_exceeded, length_fused.", "code"
)
LENGTHS_LEARNED = GATEWAY.counter("lengths_learned", "Lengths of prompts that were found to kill engines, and are refused for a while.")
FUSED_LENGTHS_LEARNED = GATEWAY.gauge("fused_lengths_learned", "How many of them there are now.")
PROMPTS_ALTERED = GATEWAY.counter(
    "prompts_altered", "Prompts altered so that their length goes ([admission] length_policy): padded or truncated.", "how"
)
REQUESTS_IN_FLIGHT = GATEWAY.gauge("requests_in_flight", "Requests accepted and not answered to the end.")
QUEUE_LENGTH = GATEWAY.gauge("queue_length", "Requests that wait for a slot or for the engine.")
QUEUE_PRIORITY_LENGTH = GATEWAY.gauge("queue_priority_length", "Requests that wait for a slot, by class.", "priority")
SLOTS_CAPACITY = GATEWAY.gauge("slots_capacity", "Decode slots: how many requests the engine is given at once.")
SLOTS_IN_USE = GATEWAY.gauge("slots_in_use", "Decode slots in use: how many requests the engine has.")
KV_TOKENS_POOL = GATEWAY.gauge("kv_tokens_pool", "Tokens that requests may reserve of the engine's KV pool; 0: not looked at.")
KV_TOKENS_RESERVED = GATEWAY.gauge("kv_tokens_reserved", "Tokens of prompts and answers that the engine may need for what it has.")
QUEUE_WAIT = GATEWAY.histogram(
    "queue_wait_seconds", "How long a request waited before it was given to an engine; over a crash, once for each engine."
)
FIRST_TOKEN = GATEWAY.histogram("time_to_first_token_seconds", "TTFT: from a streamed request's last byte in to its first token out.")
INTER_TOKEN = GATEWAY.histogram(
    "inter_token_latency_seconds", "ITL: between two events of a stream; events that came together share their gap."
)
DURATION = GATEWAY.histogram("request_duration_seconds", "From a request's last byte in to its answer's last byte out.")
COUNT_TIME = GATEWAY.histogram("prompt_count_seconds", "How long the engine took to count a prompt that may be too long.")
PROMPT_LENGTH = GATEWAY.histogram("prompt_tokens", "Length of the prompts that were answered.")
ANSWER_LENGTH = GATEWAY.histogram("answer_tokens", "Length of the answers.")
TOKENS = GATEWAY.counter(
    "tokens",
    "Tokens of prompts (in) and answers (out); usage: the engine said so, estimate: from bytes and events.",
    "direction",
    "known_by",
)
KEY_REQUESTS = GATEWAY.counter("key_requests", "Requests answered, by the name of their API key.", "key")
KEY_TOKENS = GATEWAY.counter("key_tokens", "Tokens of prompts (in) and answers (out), by the name of the API key.", "key", "direction")
UPSTREAM_LOSSES = GATEWAY.counter("upstream_losses", "Exchanges that lost their engine, by how.", "kind")
REQUESTS_RESENT = GATEWAY.counter(
    "requests_resent", "Requests given to an engine again: replayed from the start, or continued behind what the client had.", "how"
)
MEMORY_RED = GATEWAY.gauge(
    "memory_red", "1 while a card is over the red line ([admission] vram_red_line) and long prompts go to the engine alone."
)
MEMORY_HELD_BACK = GATEWAY.counter(
    "memory_held_back",
    "Requests that had to wait for memory: a card was over the red_line, or the planned headroom is less than their prefill takes.",
    "reason",
)
QUARANTINED = GATEWAY.gauge("quarantined_requests", "Bodies that are refused because engines died of them.")
FALLBACK_REQUESTS = GATEWAY.counter(
    "fallback_requests", "Requests for the fallback endpoint: answered, refused by it, lost, or too_many at once.", "outcome"
)
CONNECTIONS_CUT = GATEWAY.counter(
    "connections_cut", "Client connections cut off, by why: slow_head, slow_body, never_reads, silent_peer, ...", "reason"
)
BUILD_INFO = GATEWAY.gauge("build_info", "Always 1.", "version")
REPLICA = "replica"
"""The label by which several engines are told apart: the index of the card. With one engine nothing has it."""
REPLICA_UP = GATEWAY.gauge("replica_up", "With an engine on each card: 1 while requests go to this one.", REPLICA)
REPLICA_GENERATION = GATEWAY.gauge("replica_generation", "With an engine on each card: counts this one's lives.", REPLICA)
REPLICA_SLOTS_CAPACITY = GATEWAY.gauge("replica_slots_capacity", "With an engine on each card: decode slots of this one.", REPLICA)
REPLICA_SLOTS_IN_USE = GATEWAY.gauge("replica_slots_in_use", "With an engine on each card: how many requests this one has.", REPLICA)
REPLICA_KV_TOKENS_RESERVED = GATEWAY.gauge(
    "replica_kv_tokens_reserved", "With an engine on each card: tokens that this one may need for what it has.", REPLICA
)

ENGINE = Group(ENGINE_PREFIX)
ENGINE_METRICS_UP = ENGINE.gauge("metrics_up", "1 when the engine's own metrics could be read.")
RUNNING_REQUESTS = ENGINE.gauge("running_requests", "Requests that the engine decodes or prefills.")
WAITING_REQUESTS = ENGINE.gauge("waiting_requests", "Requests that wait inside the engine.")
KV_USED_RATIO = ENGINE.gauge("kv_used_ratio", "How full the engine's KV pool is, from 0 to 1.")
PROMPT_TOKENS = ENGINE.counter("prompt_tokens", "Prompt tokens prefilled.")
GENERATED_TOKENS = ENGINE.counter("generated_tokens", "Tokens produced.")
PREEMPTIONS = ENGINE.counter("preemptions", "Sequences set back for want of KV blocks.")

APPLIANCED = Group()
APPLIANCED_CONNECTED = APPLIANCED.gauge("applianced_connected", "1 while applianced's control socket answers.")
ENGINE_STATE = APPLIANCED.gauge("engine_state", "1 for the state the engine is in.", "state")
ENGINE_GENERATION = APPLIANCED.gauge("engine_generation", "Counts engine lives.")
ENGINE_RESTARTS = APPLIANCED.counter("engine_restarts", "Engine lives beyond the first since applianced started.")
ENGINE_RUNG = APPLIANCED.gauge("engine_rung", "The rung in force: 0 is as configured, higher is safer.")
ENGINE_RUNGS = APPLIANCED.gauge("engine_rungs", "Rungs that there are.")
GPU_XIDS = APPLIANCED.counter("gpu_xids", "Xid messages of the NVIDIA driver in the kernel's log, by number.", "xid")
GPU_MEMORY = APPLIANCED.gauge("gpu_memory_bytes", "Memory of the card, for each that NVML answers for, by its address.", "card")
GPU_MEMORY_USED = APPLIANCED.gauge("gpu_memory_used_bytes", "Memory of the card that is taken, by whomever.", "card")
GPU_POWER = APPLIANCED.gauge("gpu_power_watts", "What the card draws.", "card")
GPU_TEMPERATURE = APPLIANCED.gauge("gpu_temperature_celsius", "The card's temperature.", "card")
GPU_REPLAYS = APPLIANCED.gauge("gpu_pcie_replays", "Packets that the card's link has sent again since the driver was loaded.", "card")
INCIDENTS = APPLIANCED.gauge("incidents", "Incidents that are remembered on this box, at most the newest 1000, by cause.", "cause")
PLAN = APPLIANCED.gauge(
    "plan_bytes", "The memory plan of the rung, of one card, by term: weight, kv_pool, headroom, activation_peak, ...", "term"
)
SENSOR_UP = APPLIANCED.gauge("sensor_up", "1 while this source of evidence works.", "sensor")
