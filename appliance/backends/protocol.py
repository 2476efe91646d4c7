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


def configured_rung(config: Config, context_length_tokens: int, kv_dtype: str) -> Rung:
    """Rung 0, for engines whose settings are those of the configuration. A context of 0 is one that nobody knows."""
    return Rung(
        index=0,
        mem_fraction=config.budget.mem_fraction,
        context_length_tokens=context_length_tokens,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
        max_running=config.engine.max_running,
        kv_dtype=kv_dtype,
    )


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

    def first_rung(self, config: Config) -> Rung:
        """What the owner configured; the supervisor's ladder goes down from it."""

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """What of a rung reaches the engine: two rungs of which it is told the same are one command."""

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """The command line of one life.

        Raises:
            ModelError: the model folder is missing or half-written: there is nothing to start.
        """

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """Tried in order until one is not 404."""

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """What we assume where the engine does not say."""
