"""Rung 0 of an engine of the GPU: what is configured, and what the model's folder says where the owner says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from appliance.backends.model_folder import folder_facts
from appliance.backends.protocol import configured_rung
from appliance.config.schema import Config
from appliance.core.plan import Rung


@dataclass(frozen=True, slots=True)
class LinearState:
    """How an engine keeps linear layers' state where the owner does not say; 0 slots, empty dtype: it is not told."""

    slots_per_request: int = 0
    dtype: str = ""


def configured_in_full(config: Config, chunk_tokens: int, state: LinearState) -> Rung:
    """Said in full, as engines' own defaults move."""
    engine, facts = config.engine, folder_facts(Path(config.model.path))
    rung = configured_rung(config, engine.context_length_tokens or facts.context_tokens, engine.kv_dtype, chunk_tokens)
    has_state = facts.has_linear_layers
    per_request = state.slots_per_request if engine.prefix_cache else min(1, state.slots_per_request)
    slots = (engine.state_slots or per_request * engine.max_running) if has_state and state.slots_per_request else 0
    return replace(
        rung,
        tensor_parallel=engine.tensor_parallel,
        draft_tokens=engine.draft_tokens,
        state_slots=slots or None,
        state_dtype=(engine.state_dtype or state.dtype or None) if has_state else None,
        prefix_cache=engine.prefix_cache,
        language_only=engine.language_only,
    )
