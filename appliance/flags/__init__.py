"""Engines' command lines, by version: how a rung is said to each of them, and what may not be said beside it.

The only place that knows an engine's options. The backends start engines with it, `plan --flags` prints it, `config check` asks it
about `engine.extra_args`. Imports core alone.
"""

from __future__ import annotations

import importlib

from appliance.flags.vocabulary import EngineWords, Gone, OptionRules, Remark

ENGINES = ("native", "sglang", "vllm", "llamacpp")

__all__ = ["ENGINES", "EngineWords", "Gone", "OptionRules", "Remark", "rules_of"]


def rules_of(engine: str) -> OptionRules:
    """Of one of ENGINES. Only that engine's module is loaded."""
    assert engine in ENGINES, engine
    rules = importlib.import_module(f"appliance.flags.{engine}").RULES
    assert isinstance(rules, OptionRules)
    return rules
