"""Prompts that prove an engine: a short one for the canary, the longest that it promises to take for the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.backends.launching import served_name
from appliance.backends.protocol import ProofRequest, WorstPrompt, plain_ids
from appliance.config.schema import Config


def completion(config: Config, prompt: object, **more: object) -> ProofRequest:
    """One greedy token behind it, by OpenAI's completions."""
    body = {"model": served_name(config), "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    return ProofRequest("/v1/completions", body, has_choices)


def longest(tokens: int, request: Callable[[list[int]], ProofRequest], pool_bytes: int = 0) -> WorstPrompt | None:
    """So many token ids, as the engine takes them; None where it did not say how many that are."""
    return WorstPrompt(request(plain_ids(tokens)), tokens, pool_bytes) if tokens >= 1 else None


def has_choices(answer: Mapping[str, Any]) -> bool:
    """OpenAI's form of an answer."""
    return bool(answer.get("choices"))
