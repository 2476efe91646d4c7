"""The rungs of this configuration: what the owner wants, and below it what the planner says asks for less."""

from __future__ import annotations

from dataclasses import replace

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.core.plan import Rung
from appliance.planner.ladder import native_ladder


def ladder_of(backend: Backend, config: Config) -> tuple[Rung, ...]:
    """Index 0 is what is configured; each later one asks for less. Rungs that the engine could not tell apart are one."""
    first = backend.first_rung(config)
    different: dict[tuple[object, ...], Rung] = {}
    for rung in (first, *native_ladder(first)):
        different.setdefault(backend.told(config, rung), rung)
    return tuple(replace(rung, index=index) for index, rung in enumerate(different.values()))
