"""A reducer driven with what the real planner offers, for a model folder and a card. Not a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.backends import backend_of
from appliance.config.schema import BudgetTable, Config, EngineTable, ModelTable
from appliance.core.causes import Cause
from appliance.core.plan import GpuFacts, Rung
from appliance.core.states import EngineState
from appliance.core.units import GIB
from appliance.planner.calibration import Calibration, Setting
from appliance.planner.gpus import gpu_facts
from appliance.planner.inputs import Measured
from appliance.supervisor import events as ev
from appliance.supervisor.history import History
from appliance.supervisor.ladder import Ladders, estimate_in, facts_of
from appliance.supervisor.settings import MachineSettings
from tests.unit.planner import shapes
from tests.unit.supervisor.machine_cases import Drive, make_diagnosis, make_spec, make_state

MEASURED = Measured(round(23.23 * GIB), round(17.67 * GIB), round(0.73 * GIB), round(0.52 * GIB), source="its last start")
"""The article's own terms: free, weights, linear state, workspaces and graphs."""


def model_folder(folder: Path, shape: dict[str, Any] | None = None) -> str:
    """With a config.json that can be planned with; the article's model unless another is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape or shapes.hybrid_27b()))
    return str(folder)


def article(folder: Path, mem_fraction: float = 0.95, **engine: Any) -> Config:
    """SGLang 0.5.17 with the article's setting, the first one, which crashed."""
    defaults: dict[str, Any] = {
        "backend": "sglang", "version": "0.5.17", "context_length_tokens": 119_808, "kv_dtype": "fp8_e4m3", "max_running": 3,
        "state_slots": 9,
    }  # fmt: skip
    table = replace(EngineTable(), **(defaults | engine))
    return replace(
        Config(), model=ModelTable(path=model_folder(folder)), engine=table, budget=replace(BudgetTable(), mem_fraction=mem_fraction)
    )


class Story(Drive):
    """One engine's life after life on cards; each verdict comes with what the planner offers at that moment."""

    def __init__(
        self, config: Config, card: GpuFacts | None = None, measured: Measured | None = None, cards: int = 1, **settings: Any
    ) -> None:
        backend, self.cards = backend_of(config), cards
        known = None
        if measured is not None:
            first = backend.first_rung(config)
            known = Calibration("GPU-1", backend.name, "", "m", first.tensor_parallel, measured, Setting.of(first))
        self.ladders = Ladders(backend, config, facts_of(config), known, card or gpu_facts("rtx3090"))
        state = make_state(settings=MachineSettings(**settings), ladder=self.ladders.standing())
        super().__init__(state)
        self.give(ev.Started(), ev.GpuReady(cards)).up()

    @property
    def rung(self) -> Rung:
        """In force."""
        return self.state.rung

    @property
    def history(self) -> History:
        """Of this story so far."""
        return self.state.history

    def up(self) -> Story:
        """From wherever the next start begins to serving, where it is not parked."""
        if self.state.state is EngineState.BACKOFF:
            self.give(ev.TimerFired(self.state.generation, ev.Timer.BACKOFF))
        if self.state.state is EngineState.WAITING_FOR_GPU:
            self.give(ev.GpuReady(self.cards))
        if self.state.state is EngineState.PLANNING:
            self.started()
        return self

    def fails(self, cause: Cause, *, at_start: bool = False, cards_left: int | None = None, **numbers: float) -> Story:
        """The engine is lost for this cause, while it serves or at its next start; then it is up again, unless that is given up."""
        if at_start:
            self._begin_start()
        generation = self.state.generation
        self.give(ev.EngineExited(generation, "killed"), ev.GroupEmpty(generation))
        diagnosis = make_diagnosis(cause, numbers=tuple(numbers.items()))
        offers = self.ladders.offers(self.rung, cause, self.history.tried, estimate_in(diagnosis))
        self.give(ev.Diagnosed(generation, diagnosis, f"inc-{generation}", 0.0, cards_left, offers))
        self.check()
        return self if at_start else self.up()

    def _begin_start(self) -> None:
        """A restart that somebody asked for; its process exists, and has not answered yet."""
        if self.state.answering:
            generation = self.state.generation
            self.give(ev.RestartRequested("a person"), ev.TimerFired(generation, ev.Timer.DRAIN))
            self.give(ev.EngineExited(generation, "exit 0"), ev.GroupEmpty(generation))
        if self.state.state is EngineState.BACKOFF:
            self.give(ev.TimerFired(self.state.generation, ev.Timer.BACKOFF))
        if self.state.state is EngineState.WAITING_FOR_GPU:
            self.give(ev.GpuReady(self.cards))
        generation = self.state.generation + 1
        self.give(ev.Planned(generation, make_spec(generation, self.rung)))

    def refused(self) -> Story:
        """Its proof run finds too little memory while it serves in idle time."""
        generation = self.state.generation
        verdict = make_diagnosis(Cause.OK_DEGRADED)
        offers = self.ladders.offers(self.rung, Cause.CUDA_OOM_PREFILL, self.history.tried)
        self.give(ev.ProofRefused(generation, "its proof was refused", verdict, offers))
        if self.state.failure is not None:
            self.give(ev.EngineExited(generation, "killed"), ev.GroupEmpty(generation))
            self.give(ev.Diagnosed(generation, verdict, f"inc-{generation}", 0.0))
        self.check()
        return self.up()

    def check(self) -> None:
        """An index is a place on the ladder, and what is remembered is what stands there."""
        state = self.state
        assert [rung.index for rung in state.ladder] == list(range(len(state.ladder)))
        assert 0 <= state.history.rung < len(state.ladder)
        if state.history.rung:
            assert [rung.setting for rung in state.history.below] == [rung.setting for rung in state.ladder[1:]]
