"""Numbers for Prometheus, in its text format.

Written out by hand: thirteen series do not carry a dependency that the Debian package would have to pull in for them.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter

from appliance.engine.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


REFERENCE_BOUNDS = (0, 1, 2, 3, 5, 9, 17, 33)
"""Where each class of reference counts begins."""


class Outcome(enum.Enum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """4xx, or 503 because there was no engine to give it to."""
    FAILED = "failed"
    """The engine could not finish it."""
    DISCONNECTED = "disconnected"
    """The client left before the last byte."""


class Histogram:
    """Prometheus' cumulative histogram."""

    def __init__(self, name: str, doc: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._doc = doc
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        """In the text format."""
        lines = _head(self._name, "histogram", self._doc)
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self._name}_sum {self._sum:.6f}", f"{self._name}_count {total}"]


class HttpMetrics:
    """What the HTTP side counts itself."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, Outcome]] = Counter()
        self.first_token_s = Histogram(
            "appliance_engine_time_to_first_token_seconds",
            "From the request's body to the first token: inside the engine, without the queue before it.",
            (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        )
        self.whole_s = Histogram(
            "appliance_engine_request_seconds",
            "From the request's body to the last byte, of finished requests.",
            (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )

    def count(self, path: str, outcome: Outcome) -> None:
        """One request is over."""
        self._requests[path, outcome] += 1

    def lines(self) -> list[str]:
        """In the text format."""
        name = "appliance_engine_requests_total"
        lines = _head(name, "counter", "Requests by endpoint and how they ended; the gateway's questions are among them.")
        for (path, outcome), count in sorted(self._requests.items(), key=lambda item: (item[0][0], item[0][1].value)):
            lines.append(f'{name}{{path="{path}",outcome="{outcome.value}"}} {count}')
        return [*lines, *self.first_token_s.lines(), *self.whole_s.lines()]


def render(http: HttpMetrics, stats: EngineStats | None) -> str:
    """The whole page; without an engine, only what the HTTP side knows."""
    lines = [*_series("ready", "gauge", "1 once the model answers.", 0 if stats is None else 1), *http.lines()]
    if stats is not None:
        lines += _engine_lines(stats)
    return "\n".join(lines) + "\n"


def _engine_lines(stats: EngineStats) -> list[str]:
    return [
        *_series("steps_total", "counter", "Scheduler steps that prefilled a chunk or produced a token.", stats.progress),
        *_series("running_requests", "gauge", "Sequences that hold KV blocks.", stats.running),
        *_series("waiting_requests", "gauge", "Sequences that wait to start.", stats.waiting),
        *_series("prompt_tokens_total", "counter", "Prompt tokens prefilled.", stats.prompt_tokens),
        *_series("cached_tokens_total", "counter", "Prompt tokens taken from the prefix cache instead.", stats.cached_tokens),
        *_series("generated_tokens_total", "counter", "Tokens produced.", stats.generated_tokens),
        *_series("preemptions_total", "counter", "Sequences set back for want of KV blocks.", stats.preemptions),
        *_series("swaps_total", "counter", "Preemptions whose KV blocks were set aside and brought back, not computed again.", stats.swaps),
        *_series("kv_blocks", "gauge", "KV blocks there are.", stats.kv_blocks_total),
        *_series("kv_blocks_used", "gauge", "KV blocks held by sequences.", stats.kv_blocks_used),
        *_series("kv_blocks_kept", "gauge", "KV blocks that the prefix cache alone keeps.", stats.kv_blocks_kept),
        *_series("evictions_total", "counter", "KV blocks that the prefix cache gave up for others.", stats.evictions),
        *_series(
            "block_violations_total",
            "counter",
            "Accesses to KV blocks that a kernel refused: a defect, and nothing was written.",
            stats.block_violations,
        ),
        *_series(
            "decode_launches_total",
            "counter",
            "Launches of the decode kernels: one a step, for all layers and everybody who decodes.",
            stats.decode_launches,
        ),
        *_reference_lines(stats.block_references),
        *_series("last_step_seconds", "gauge", "Duration of the last completed step.", round(stats.last_step_s, 6)),
    ]


def _reference_lines(references: tuple[tuple[int, int], ...]) -> list[str]:
    """Reference counts of KV blocks: fewest, most, and how many blocks have how many. (Prometheus keeps `le` for histograms of events.)"""
    if not references:
        return []
    name = "appliance_engine_kv_blocks_by_references"
    lines = _head(
        name,
        "gauge",
        "KV blocks by their number of holders: 0 are free or kept by the prefix cache alone, 2 and more are beginnings that prompts share.",
    )
    for first, last in zip(REFERENCE_BOUNDS, (*(bound - 1 for bound in REFERENCE_BOUNDS[1:]), None), strict=True):
        count = sum(blocks for holders, blocks in references if first <= holders and (last is None or holders <= last))
        label = f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"
        lines.append(f'{name}{{references="{label}"}} {count}')
    return [
        *_series("kv_block_references_min", "gauge", "Fewest holders of a KV block, at most a second ago.", references[0][0]),
        *_series("kv_block_references_max", "gauge", "Most holders of a KV block, at most a second ago.", references[-1][0]),
        *lines,
    ]


def _series(name: str, kind: str, doc: str, value: float) -> list[str]:
    full = f"appliance_engine_{name}"
    return [*_head(full, kind, doc), f"{full} {value}"]


def _head(name: str, kind: str, doc: str) -> list[str]:
    return [f"# HELP {name} {doc}", f"# TYPE {name} {kind}"]
