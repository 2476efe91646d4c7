"""What every engine's file provides."""

from __future__ import annotations

import contextlib
import itertools
import json
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


@dataclass(frozen=True, slots=True)
class WorstPrompt:
    """The longest prompt that a running engine promises to take.

    Attributes:
        tokens: its length.
        pool_bytes: of a KV cache whose memory is taken page by page, as prompts write it; 0: it was taken at the start.
    """

    request: ProofRequest
    tokens: int
    pool_bytes: int = 0


_PLAIN = 29
_calls = itertools.count()


def plain_ids(count: int) -> list[int]:
    """So many token ids that every vocabulary has. What they say does not matter: a prefill computes the same.

    Each call begins with two others, so that nothing of the prompt is in a prefix cache: of a run that was cut short much is.
    """
    call = next(_calls)
    first = (call // _PLAIN + call) % _PLAIN, call % _PLAIN
    return [3 + first[position] if position < len(first) else 3 + position % _PLAIN for position in range(count)]


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine says of itself in an answered probe; 0 where it does not."""

    progress: int | None = None
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    block_violations: int = 0
    counts_requests: bool = False
    """It says how many requests run; else nobody knows whether it is idle."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Counters:
        """From the body of the built-in engine's /health."""
        known = {name: count_in(body, name) or 0 for name in ("running", "waiting", "kv_blocks_used", "block_violations")}
        return cls(count_in(body, "progress"), **known, counts_requests=count_in(body, "running") is not None)


def count_in(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number of that name; None where it is missing or something else."""
    value = body.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def json_object(body: bytes) -> dict[str, Any]:
    """An answer's body as a JSON object; empty where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(body)
        return document if isinstance(document, dict) else {}
    return {}


@dataclass(frozen=True, slots=True)
class Voice:
    """How an engine that is ready says how it is. (That it is ready, it says by 200 on LaunchSpec.probe_path.)

    Attributes:
        pulse_path: what is asked from then on; it must cost the engine nothing and its clients no time.
        counters: what the answer's body says.
        limits: what is asked once, in this order: a path, and how that answer's body and what is known so far become what it takes.
            Empty: `limits` in the body of the probe's answer is an EngineLimits.
        whole_batches: its counters move once a batch, which may take long: while it computes, that is no hang before the ceiling.
    """

    pulse_path: str
    counters: Callable[[bytes], Counters]
    limits: tuple[tuple[str, Callable[[bytes, EngineLimits], EngineLimits]], ...] = ()
    whole_batches: bool = False


OWN_VOICE = Voice("/health", lambda body: Counters.of(json_object(body)))
"""The built-in engine's (docs/structures.md, "The engine's HTTP")."""


def configured_rung(config: Config, context_length_tokens: int, kv_dtype: str, chunk_tokens: int = 256) -> Rung:
    """Rung 0, for engines whose settings are those of the configuration. A context of 0 is one that nobody knows.

    Args:
        chunk_tokens: what suits the engine, where the owner says nothing.
    """
    return Rung(
        index=0,
        mem_fraction=config.budget.mem_fraction,
        context_length_tokens=context_length_tokens,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens or chunk_tokens,
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

    @property
    def voice(self) -> Voice:
        """How it is asked for its counters and its limits."""

    def first_rung(self, config: Config) -> Rung:
        """What the owner configured; the supervisor's ladder goes down from it."""

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """What of a rung reaches the engine: two rungs of which it is told the same are one command."""

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """The command line of one life.

        Raises:
            ModelError: the model folder is missing or half-written: there is nothing to start.
            ConfigError: there is no engine to start it with.
        """

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """Tried in order until one is not 404."""

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """For a proof run of an engine that said these limits; None where it did not say how long a prompt may be."""

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """What we assume where the engine does not say."""
