"""How long a context a model's configuration gives it: one rule, for who plans and for who serves."""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 1 << 60


def context_tokens(named_tokens: int, config: Mapping[str, object]) -> int:
    """max(named, factor · original) where config.json asks for YaRN, else named.

    Qwen's instructions have YaRN added to a file that goes on naming the length from before. Engines differ: vLLM takes factor · original,
    SGLang what is named. Of a scaling that is none, nothing is said here: who serves it refuses it.

    Args:
        named_tokens: `max_position_embeddings`, or what stands for it.
        config: the language model's part of config.json.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or (scaling.get("rope_type") or scaling.get("type")) != "yarn":
        return named_tokens
    original = scaling.get("original_max_position_embeddings")
    extended = _number(scaling.get("factor")) * (named_tokens if original is None else _number(original))
    return max(named_tokens, int(extended))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) <= _MOST else 0.0
