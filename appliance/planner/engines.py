"""The table of engines: whose arithmetic a plan follows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from appliance.core.plan import MemoryPlan
from appliance.planner.inputs import PlanInputError, PlanInputs

ENGINES = ("sglang", "vllm", "llamacpp", "native")
_OTHER_NAMES = {"llama.cpp": "llamacpp", "llama-server": "llamacpp", "llama_cpp": "llamacpp", "llama-cpp": "llamacpp"}


@dataclass(frozen=True, slots=True)
class EngineRules:
    """One engine's arithmetic.

    Attributes:
        resolve: inputs → the same with every default filled in and named.
        plan_at: resolved inputs and a fraction → the chain.
        tightest_fraction: where the peak grows with the context, the fraction of the longest context that still fits; else None.
        state_slots: resolved inputs → slots of linear state that the engine is told; None: it is not told.
    """

    resolve: Callable[[PlanInputs], PlanInputs]
    plan_at: Callable[[PlanInputs, float], MemoryPlan]
    tightest_fraction: Callable[[PlanInputs], float] | None = None
    state_slots: Callable[[PlanInputs], int] | None = None


def engine_name(word: str) -> str:
    """The engine's name, whatever it is called.

    Raises:
        PlanInputError: no such engine.
    """
    name = _OTHER_NAMES.get(word.lower(), word.lower())
    if name not in ENGINES:
        raise PlanInputError(f"engine {word!r} is not known", hint=f"one of {', '.join(ENGINES)}")
    return name


def rules_of(engine: str) -> EngineRules:
    """The rules of "sglang", "vllm", "llamacpp" or "native". Only that engine's module is loaded.

    Raises:
        PlanInputError: no such engine.
    """
    name = engine_name(engine)
    module = importlib.import_module(f"appliance.planner.{name}")
    return EngineRules(module.resolve, module.plan_at, getattr(module, "tightest_fraction", None), getattr(module, "state_slots", None))
