"""The rungs of a configuration: what the owner wants, and below it what asks for less.

Where the model and the card can be read, nothing below rung 0 is fixed. When an engine is lost, the planner works out for that cause, and
from the rung that was in force, which settings help (`Ladders.offers`); the policy takes the first of them. Until then a forecast stands
below: the rungs for a prompt that runs out of memory, which is what engines on cards are lost to most.

Fixed steps stand in their place (planner/card_ladder.py, `native_ladder`)
* where model or card cannot be read, or the planner cannot plan with what is configured;
* for the built-in engine: its chunk begins where the planner's smallest one ends, its pool is the owner's, it has no features to switch
  off, and a fraction means nothing to it. What the planner could say, it would not be told;
* for an engine of somebody else's (`custom`), of whose memory nothing is known.

vLLM and SGLang without a card take the machine's memory. Out of it, or with too little of it for a sequence, neither the planner's chain
nor the fixed steps fit: what helps is worked out from the machine's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from appliance.backends import Backend
from appliance.config.runtimes import earlier_runtime, runtime_of
from appliance.config.schema import Config
from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.errors import ApplianceError
from appliance.core.plan import GpuFacts, MemoryPlan, ModelFacts, Rung
from appliance.core.units import GIB
from appliance.planner import ladder as planner
from appliance.planner.between_cards import kept_off
from appliance.planner.calibration import Calibration, calibrated
from appliance.planner.card_ladder import card_ladder, llamacpp_ladder, shorter_contexts, smaller_pools
from appliance.planner.engines import ENGINES, rules_of
from appliance.planner.features import CURRENT_RUNTIME
from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.model_files import model_facts
from appliance.supervisor.history import Tried

_FIXED = {"sglang": card_ladder, "vllm": card_ladder, "llamacpp": llamacpp_ladder}
"""Engines with more to give up than chunk, sequences and context, or in another order."""
_FRACTION_OF_MACHINE = ("sglang", "vllm")
"""Engines whose fraction is one of the machine's memory where there is no card."""
ENGINE_ON_CPU_BYTES = GIB
"""Beside weights and KV cache: 0.8 GiB of vLLM 0.32's worker, with a model of 0.25 GiB."""
FORECAST = Cause.CUDA_OOM_PREFILL
ESTIMATE = "estimate_tokens"
"""Of a diagnosis: the context that the engine itself says would fit (vLLM's "estimated maximum model length")."""


class Ladders:
    """The rungs of one configuration in one place. Reads nothing: what is known is given."""

    def __init__(
        self,
        backend: Backend,
        config: Config,
        facts: ModelFacts | None,
        known: Calibration | None = None,
        place: GpuFacts | None = None,
        *,
        machine_bytes: int | None = None,
    ) -> None:
        """
        Args:
            known: what earlier starts measured.
            place: the card, or for the built-in engine the machine's memory.
            machine_bytes: all of the machine's memory, where an engine made for cards has none.
        """
        self._machine_bytes = machine_bytes if backend.name in _FRACTION_OF_MACHINE else None
        self._weight_bytes = facts.weight_bytes if facts is not None else 0
        self._backend, self._config, self._known, self._card = backend, config, known, place
        readable = backend.name in ENGINES and facts is not None and place is not None
        self._facts: ModelFacts | None = facts if readable else None
        self._place: GpuFacts | None = place if readable else None

    def standing(self, below: tuple[Rung, ...] = ()) -> tuple[Rung, ...]:
        """Index 0 is what is configured; each later one asks for less. Rungs that the engine could not tell apart are one.

        Args:
            below: those that a history goes by; they stay, and get their plans. None of them: a forecast.
        """
        first = self._first()
        if below:
            return tuple(self.planned(rung) for rung in (first, *below))
        rungs = self._forecast(first)
        if rungs is None:
            rungs = _FIXED.get(self._backend.name, planner.native_ladder)(first)
        return tuple(self.planned(rung) for rung in (first, *self._told_apart(first, rungs)))

    def offers(
        self, failed: Rung, cause: Cause, tried: tuple[Tried, ...] = (), estimated_context_tokens: int | None = None
    ) -> tuple[Rung, ...] | None:
        """The rungs that help against this cause, the cheapest first; none that failed before, of whatever. None: see the module."""
        if self._machine_bytes:
            rungs = self._on_cpu(self._machine_bytes, failed, cause, estimated_context_tokens)
            return self._told_apart(failed, rungs, (entry.setting for entry in tried)) or None
        if self._facts is None or self._backend.name == "native":
            return None
        history = tuple(planner.Tried(entry.setting, entry.cause) for entry in tried if entry.cause in planner.FAMILIES)
        try:
            rungs = planner.ladder(
                self._inputs(failed), cause, history,
                failed=failed, first_index=failed.index + 1, estimated_context_tokens=estimated_context_tokens,
            )  # fmt: skip
        except ApplianceError:
            return None  # a setting that cannot be planned: whoever starts it says so
        told = self._told_apart(failed, rungs, (entry.rung for entry in history))
        return tuple(self.planned(rung) for rung in told)

    def _on_cpu(self, machine_bytes: int, failed: Rung, cause: Cause, estimated_context_tokens: int | None) -> tuple[Rung, ...]:
        if cause is Cause.HOST_OOM:
            return smaller_pools(failed, (self._weight_bytes + ENGINE_ON_CPU_BYTES) / machine_bytes)
        return shorter_contexts(failed, estimated_context_tokens) if cause is Cause.KV_POOL_TOO_SMALL else ()

    def planned(self, rung: Rung) -> Rung:
        """With the chain at its own fraction, where facts are known."""
        if self._facts is None:
            return rung
        try:
            return replace(rung, plan=self._plan(rung))
        except ApplianceError:
            return replace(rung, plan=None)  # as configured it cannot be: whoever starts it says so

    def _first(self) -> Rung:
        """As configured, and without what these cards are no safe ground for."""
        rung = self._backend.first_rung(self._config)
        off = kept_off(self._card, rung.tensor_parallel, self._backend.name, self._config.gpu.p2p)
        return replace(rung, features_off=rung.features_off | off)

    def _forecast(self, first: Rung) -> tuple[Rung, ...] | None:
        """As for a prompt that ran out of memory, and last of all the rung for fewer cards: one may be missing at a start."""
        rungs = self.offers(first, FORECAST)
        if rungs is None or first.tensor_parallel < 2:
            return rungs
        return (*rungs, *(self.offers(first, Cause.GPU_OFF_BUS) or ()))

    def _told_apart(self, failed: Rung, rungs: Iterable[Rung], tried: Iterable[Rung] = ()) -> tuple[Rung, ...]:
        """Those of which the engine would be told something that it was not told before, numbered on."""
        before = {self._told(rung) for rung in (failed, *tried)}
        different: dict[tuple[object, ...], Rung] = {}
        for rung in rungs:
            different.setdefault(self._told(rung), rung)
        fresh = (rung for told, rung in different.items() if told not in before)
        return tuple(replace(rung, index=index) for index, rung in enumerate(fresh, failed.index + 1))

    def _told(self, rung: Rung) -> tuple[object, ...]:
        config = started_from(self._config, rung)
        return (config.engine.python, *self._backend.told(config, rung))

    def _inputs(self, rung: Rung) -> PlanInputs:
        """A rung as the planner takes it, with what was measured; the built-in engine's pool is the owner's."""
        assert self._facts is not None and self._place is not None
        engine, config = self._backend.name, started_from(self._config, rung)
        native, before = engine == "native", runtime_of(config.engine.python)
        version = before.rpartition("-")[2] if config is not self._config else config.engine.version or self._backend.version
        inputs = PlanInputs(
            self._facts,
            self._place,
            engine,
            "" if native else version,
            mem_fraction=rung.mem_fraction,
            context_length_tokens=rung.context_length_tokens or None,
            kv_dtype=rung.kv_dtype or "auto",
            weights_dtype=config.engine.weights_dtype if native else "",
            swap_bytes=config.engine.swap_bytes if native else None,
            tensor_parallel=rung.tensor_parallel,
            prefill_chunk_tokens=rung.prefill_chunk_tokens,
            max_running=rung.max_running,
            draft_tokens=rung.draft_tokens,
            state_dtype=rung.state_dtype,
            state_slots=rung.state_slots,
            prefix_cache=rung.prefix_cache,
            block_tokens=config.engine.block_tokens if native else rung.block_tokens,
            language_only=rung.language_only,
            features_off=rung.features_off,
            measured=Measured(kv_pool_bytes=config.engine.kv_pool_bytes, source="as configured") if native else Measured(),
        )
        known = self._known if self._known is None else self._known.on_cards(rung.tensor_parallel)
        return inputs if known is None else calibrated(inputs, known)

    def _plan(self, rung: Rung) -> MemoryPlan:
        inputs = self._inputs(rung)
        rules = rules_of(inputs.engine)
        resolved = rules.resolve(inputs)
        fraction = inputs.mem_fraction if inputs.mem_fraction is not None else 0.9
        plan = rules.plan_at(resolved, fraction)
        if 0 < plan.context_length_tokens <= plan.sequence_tokens or not plan.sequence_tokens:
            return plan
        return rules.plan_at(
            replace(resolved, context_length_tokens=plan.sequence_tokens), fraction
        )  # an engine takes no more than its pool


def started_from(config: Config, rung: Rung) -> Config:
    """The configuration that a rung is started from: where it gives up the runtime in force, the one before that stands in its place.

    The link to the one in force stays where it is: any rung above is started from that again.
    """
    if CURRENT_RUNTIME not in rung.features_off:
        return config
    engine = config.engine
    earlier = earlier_runtime(engine.python)
    if earlier is None:
        return config
    program = str(earlier / "bin" / Path(engine.program).name) if engine.program else engine.program
    return replace(config, engine=replace(engine, python=str(earlier / "bin" / "python"), program=program, version=""))


def facts_of(config: Config) -> ModelFacts | None:
    """Of the configured model; None where it cannot be read, which whoever starts it will say, and for the built-in engine on a card,
    whose memory the planner does not know."""
    if config.engine.backend == "native" and config.engine.device == "cuda":
        return None
    try:
        return model_facts(config.model.path)
    except ApplianceError:
        return None


def estimate_in(diagnosis: Diagnosis) -> int | None:
    """The context that the engine itself said would fit."""
    tokens = dict(diagnosis.numbers).get(ESTIMATE)
    return int(tokens) if tokens else None
