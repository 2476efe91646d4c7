"""Factories for tests of the reducer and the policy: all defaults, one thing changed per test."""

from __future__ import annotations

from typing import Any

from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Confidence, Diagnosis
from appliance.core.evidence import Source
from appliance.core.launch import Endpoint, EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from appliance.supervisor.history import Failure, Phase
from appliance.supervisor.machine import MachineState, step
from appliance.supervisor.settings import MachineSettings

LIMITS = EngineLimits("demo", 1024, 8, 4096)


def make_rung(index: int = 0, **changes: Any) -> Rung:
    """One that asks for less with each index."""
    defaults: dict[str, Any] = {
        "mem_fraction": 0.9,
        "context_length_tokens": 4096 >> max(0, index - 2),
        "prefill_chunk_tokens": 256 >> min(index, 1),
        "max_running": 8 >> max(0, min(index - 1, 1)),
        "kv_dtype": "float32",
    }
    return Rung(index=index, **(defaults | changes))


LADDER = tuple(make_rung(index) for index in range(4))
TWO_CARDS = (*(make_rung(index, tensor_parallel=2) for index in range(4)), make_rung(4))
"""Rungs that share the model between two cards, and a last one for one card."""


def make_spec(generation: int = 1, rung: Rung = LADDER[0]) -> LaunchSpec:
    """A command that is never run."""
    endpoint = Endpoint(socket_path=f"/run/engine-{generation}.sock")
    return LaunchSpec(("engine",), {}, "/", endpoint, "/health", 60.0, 5.0, "native", rung)


def make_diagnosis(cause: Cause = Cause.KILLED_UNKNOWN, **changes: Any) -> Diagnosis:
    """A verdict with a root line."""
    defaults: dict[str, Any] = {
        "confidence": Confidence.HIGH,
        "sentence": f"{cause.definition}.",
        "root": Citation(Source.EXIT, 0, "killed by SIGKILL"),
    }
    return Diagnosis(cause, **(defaults | changes))


def make_failure(phase: Phase = Phase.SERVING, **changes: Any) -> Failure:
    """A crash being handled."""
    return Failure(time_s=0.0, generation=1, phase=phase, rung=0, first_evidence="x", **changes)


def make_state(**changes: Any) -> MachineState:
    """Before Started."""
    defaults: dict[str, Any] = {"settings": MachineSettings(), "ladder": LADDER}
    return MachineState(**(defaults | changes))


class Drive:
    """A reducer being driven: the state, the effects of the last event, and all of them."""

    def __init__(self, state: MachineState | None = None) -> None:
        self.state = state or make_state()
        self.now_s = 100.0
        self.effects: tuple[ev.Effect, ...] = ()
        self.every: list[ev.Effect] = []
        self.visited: list[EngineState] = [self.state.state]

    def give(self, *given: ev.Event, after_s: float = 0.0) -> Drive:
        """Feed events, the first one after so long."""
        self.now_s += after_s
        for event in given:
            self.state, self.effects = step(self.state, event, self.now_s)
            self.every.extend(self.effects)
            self.visited.append(self.state.state)
        return self

    def serving(self) -> Drive:
        """On to SERVING from wherever a start begins."""
        if self.state.generation == 0:
            self.give(ev.Started(), ev.NoGpu("no card"))
        return self.started()

    def started(self) -> Drive:
        """From PLANNING to SERVING."""
        g = self.state.generation + 1
        self.give(ev.Planned(g, make_spec(g, self.state.rung)), ev.EngineReady(g, LIMITS))
        return self.give(ev.Proved(g), after_s=2.0)

    def crashed(self, cause: Cause, jitter: float = 0.0) -> Drive:
        """The engine dies, is cleared away, and the verdict is in."""
        g = self.state.generation
        return self.give(ev.EngineExited(g, "killed by SIGKILL"), ev.GroupEmpty(g)).give(
            ev.Diagnosed(g, make_diagnosis(cause), f"inc-{g}", jitter)
        )

    def of(self, kind: type) -> list[Any]:
        """The last event's effects of a kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]
