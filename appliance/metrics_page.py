"""docs/metrics.md, written from what is served: `python -m appliance.metrics_page`.

It stands above gateway and engine, which know nothing of each other: most numbers are defined by the gateway, and some by
the built-in engine, whose page it reads as the gateway does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from appliance.engine.api.metrics import HttpMetrics, Outcome, render
from appliance.engine.messages import EngineStats
from appliance.gateway.definitions import APPLIANCED, ENGINE, GATEWAY, Definition, Kind
from appliance.gateway.sources import SERIES

HEAD = """\
# Metrics

Written from `appliance/gateway/definitions.py` and the built-in engine's own page; change those, then `make format`.

`GET /metrics` on the gateway's port, in Prometheus' text format; with API keys it needs one (`monitor_only = true` is enough). One scrape
has the gateway's own counts, the engine's, and what applianced says; whoever does not answer within a second is missing from it, and
nothing else is. With an engine on each card what an engine says itself, and rung, restarts and plan, have the label `replica`.
`[metrics] enabled = false` switches the page off. A dashboard and alert rules stand in docs/monitoring/.

    scrape_configs:
      - job_name: llm-appliance
        authorization: {credentials_file: /etc/prometheus/llm-appliance.key}
        static_configs: [{targets: ["127.0.0.1:8000"]}]

Counters are of the gateway's life, those of the engine of the engine's: use `rate()` and `increase()`.
"""
PROCESS = "| `appliance_gateway_process_*` | | | CPU, memory and descriptors of the gateway's process. |"
OF_ENGINES = """\
The names are the same whichever engine runs; the last column says which have them: SGLang with `--enable-metrics`, llama.cpp with
`--metrics`. What an engine names `appliance_engine_*` itself goes through as it is.
"""
ENGINES = {"built-in": "built-in", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
_COLUMNS = ("name", "type", "labels", "what")
_PAGE = re.compile(r"\bdocs/([a-z0-9-]+)\.md")
_CODE = re.compile(r"\[\w+\] \w+|\b[a-z]+(?:_[a-z]+)+\b")
"""A key of the configuration, or a word that only programs write."""
_BUSY = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, block_references=((0, 1),))
"""Of an engine that has something to say in every series."""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            *(HEAD, "## The gateway", "", *_table(GATEWAY.metrics), PROCESS, ""),
            *("## The engine", "", OF_ENGINES, *_engine_table(), ""),
            *("## applianced", "", *_table(APPLIANCED.metrics), ""),
        ]
    )


def built_in() -> list[Definition]:
    """What the built-in engine serves, read from its page."""
    http = HttpMetrics()
    http.count("/health", Outcome.FINISHED)
    return [_definition(family) for family in text_string_to_metric_families(render(http, _BUSY))]


def _definition(family: Metric) -> Definition:
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    return Definition(family.name, Kind(family.type), family.documentation, tuple(labels))


def _engine_table() -> Iterator[str]:
    """What the gateway defines for all engines first, then what the built-in one alone has."""
    own = {definition.family: definition for definition in built_in()}
    theirs = {series.ours.family: {name.partition(":")[0] for name in series.theirs} for series in SERIES}
    yield from _header((*_COLUMNS, "of"))
    for definition in ENGINE.metrics:
        # The gateway itself says whether there is a page; how full the pool is, it works out of the built-in engine's blocks.
        has = set(ENGINES) if definition.family not in theirs else {"built-in", *theirs[definition.family]}
        yield _row(definition, "all" if has == set(ENGINES) else ", ".join(words for engine, words in ENGINES.items() if engine in has))
    for family, definition in own.items():
        if family not in {shared.family for shared in ENGINE.metrics}:
            yield _row(definition, ENGINES["built-in"])


def _table(metrics: Iterable[Definition]) -> list[str]:
    return [*_header(_COLUMNS), *map(_row, metrics)]


def _header(columns: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def _row(definition: Definition, *more: str) -> str:
    labels = ", ".join(f"`{label}`" for label in definition.labels)
    return f"| {' | '.join((f'`{definition.name}`', definition.kind.value, labels, _words(definition.text), *more))} |"


def _words(text: str) -> str:
    return _PAGE.sub(r"[\1](\1.md)", _CODE.sub(r"`\g<0>`", text))


if __name__ == "__main__":
    print(page(), end="")
