"""Numbers for Prometheus. Counted as plain integers on the way, turned into families only when somebody asks."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
Gauges = Iterable[tuple[str, str, float, dict[str, str]]]
"""Name without prefix, help, value, labels; one name may come several times with different labels."""


class Distribution:
    """A histogram with fixed bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One more, or several of the same."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus counts: cumulative, up to +Inf."""
        cumulated, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulated += count
            buckets.append((bound, cumulated))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    """What the gateway has counted since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """(endpoint, status) → requests; 499 is a client that left."""
        self.lost: Counter[str] = Counter()
        """Kind of loss → exchanges that lost their engine."""
        self.resent = 0
        self.tokens: Counter[tuple[str, str]] = Counter()
        """(in or out, how it is known) → tokens."""
        self.of_key: Counter[tuple[str, str]] = Counter()
        """(key, requests, tokens_in or tokens_out) → how many."""
        self.refusals: Counter[str] = Counter()
        """Code of the error → requests that were refused before the engine had them."""
        self.fuse_trips: Counter[str] = Counter()
        """Code of the error → prompts that were refused for their length."""
        self.count_time = Distribution(_FIRST_TOKEN_S)
        self.first_token = Distribution(_FIRST_TOKEN_S)
        self.inter_token = Distribution(_INTER_TOKEN_S)
        self.duration = Distribution(_DURATION_S)
        self.queue_wait = Distribution(_DURATION_S)

    def render(self, gauges: Gauges, cut: dict[str, int]) -> bytes:
        """The text format. `cut` is the connections cut off, by reason."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(lambda: [*self._families(cut), *_gauge_families(gauges)]))
        return generate_latest(registry)

    def _families(self, cut: dict[str, int]) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "appliance_requests", "Requests to the engine's endpoints, by status; 499: the client left.", labels=("endpoint", "code")
        )
        for (endpoint, code), count in sorted(self.requests.items()):
            requests.add_metric((endpoint, str(code)), count)
        yield requests
        yield _counter("appliance_upstream_losses", "Exchanges that lost their engine, by how.", "kind", self.lost)
        yield CounterMetricFamily("appliance_requests_resent", "Requests given to an engine again after a loss.", value=self.resent)
        yield _counter("appliance_refusals", "Requests that the gateway refused, by the code of the error.", "code", self.refusals)
        yield _counter("appliance_fuse_trips", "Prompts refused for their length, by the code of the error.", "code", self.fuse_trips)
        yield self.count_time.family("appliance_prompt_count_seconds", "How long the engine took to count a prompt that may be too long.")
        yield _counter("appliance_connections_cut", "Client connections cut off, by why.", "reason", cut)
        yield self.first_token.family(
            "appliance_time_to_first_token_seconds", "From a streamed request's last byte in to its first token out."
        )
        yield self.duration.family("appliance_request_duration_seconds", "From a request's last byte in to its answer's last byte out.")
        yield self.queue_wait.family("appliance_queue_wait_seconds", "How long a request waited before it was given to an engine.")


class _Once:
    """prometheus_client's collector interface over a function."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        return self._families()


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for key, count in sorted(values.items()):
        family.add_metric((key,), count)
    return family


def _gauge_families(gauges: Gauges) -> Iterable[GaugeMetricFamily]:
    families: dict[str, GaugeMetricFamily] = {}
    for name, text, value, labels in gauges:
        if name not in families:
            families[name] = GaugeMetricFamily(f"appliance_{name}", text, labels=tuple(labels))
        families[name].add_metric(tuple(labels.values()), value)
    return families.values()
