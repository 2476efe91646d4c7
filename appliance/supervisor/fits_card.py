"""Whether what is about to be started fits the driver and the card: what cannot start is refused by name, not by a riddle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.backends.protocol import Backend
from appliance.compatibility import Card, Host, driver_of, judge_weights, mismatches, needs_of
from appliance.config.runtimes import packages_of
from appliance.config.schema import Config
from appliance.core.errors import ConfigError
from appliance.core.launch import LaunchSpec
from appliance.core.plan import GpuFacts
from appliance.planner.between_cards import DIRECT, why_off

ENGINES = ("sglang", "vllm")
"""Those whose environment says what it was built for."""


def checked(spec: LaunchSpec, backend: Backend, config: Config, card: GpuFacts | None, proc: Path) -> LaunchSpec:
    """The same, with a note more where the card makes something else of the weights than their name says, or is no ground for P2P.

    Args:
        card: the first usable one; None: it was not asked.

    Raises:
        ConfigError: the engine could not start on this driver or card.
    """
    if spec.engine not in ENGINES:
        return spec
    cards = (Card(card.name, card.compute_capability),) if card is not None else ()
    needs = needs_of(f"{spec.engine} {backend.version}".strip(), spec.engine, packages_of(spec.argv[0]))
    found = list(mismatches(needs, Host(driver_of(proc), cards)))
    verdict = judge_weights(_model_config(config), cards[0]) if cards else None
    if verdict is not None and verdict.refused:
        found.append(verdict.sentence)
    if found:
        raise ConfigError("; ".join(found))
    between = why_off(card, spec.rung.tensor_parallel) if card is not None and spec.rung.features_off >= DIRECT else ""
    notes = (between, verdict.sentence if verdict is not None else "")
    return replace(spec, notes=(*spec.notes, *filter(None, notes)))


def _model_config(config: Config) -> dict[str, Any]:
    try:
        document = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
