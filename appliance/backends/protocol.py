"""What every engine's file provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.config.schema import Config
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.core.plan import Rung


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """One short prompt, and what an answer with a token in it looks like."""

    path: str
    body: Mapping[str, Any]
    accepts: Callable[[Mapping[str, Any]], bool]


class Backend(Protocol):
    """One engine. Stateless: everything is a function of the configuration and the rung."""

    @property
    def name(self) -> str:
        """The word in `engine.backend`, incidents and `diagnose --engine`."""

    @property
    def version(self) -> str:
        """Of the engine, for incidents; empty where we do not know."""

    @property
    def uses_gpu(self) -> bool:
        """Whether it computes on a card where there is one: then the card is waited for, and its loss is the engine's."""

    def ladder(self, config: Config) -> tuple[Rung, ...]:
        """Index 0 is what the owner configured; each later one asks for less."""

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """The command line of one life.

        Raises:
            ModelError: the model folder is missing or half-written: there is nothing to start.
        """

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """Tried in order until one is not 404."""

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """What we assume where the engine does not say."""
