"""What a life of the configured engine is begun with: how it is watched, and which process may wait beside it for the next one."""

from __future__ import annotations

from pathlib import Path

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.core.errors import ApplianceError
from appliance.core.states import EngineState
from appliance.supervisor.forensic_bench import ForensicBench
from appliance.supervisor.hang import HangLimits
from appliance.supervisor.ladder import started_from
from appliance.supervisor.machine import MachineState
from appliance.supervisor.probe import ProbeSettings
from appliance.supervisor.spare_keeper import Wish


def probe_settings(config: Config, backend: Backend) -> ProbeSettings:
    """How often it is asked, and what its silence means."""
    supervisor = config.supervisor
    limits = HangLimits(supervisor.hang_floor_s, supervisor.hang_ceiling_s)
    every_s, timeout_s = supervisor.probe_interval_s, supervisor.probe_timeout_s
    canary, voice = backend.proof(config), backend.voice
    return ProbeSettings(every_s, timeout_s, limits, supervisor.start_stall_s, supervisor.canary_s, canary, voice)


def spare_wish(state: MachineState, config: Config, backend: Backend, bench: ForensicBench, run_dir: Path) -> Wish:
    """Which spare there should be: one that can become the next life on this rung."""
    if state.state in (EngineState.PARKED, EngineState.STOPPED):
        return Wish(None, why_not=f"none while {state.state.value}")
    if not config.engine.warm_spare:
        return Wish(None, why_not="none: engine.warm_spare is false")
    try:
        plain = backend.launch_spec(started_from(config, state.rung), state.rung, state.generation + 1, run_dir)
        spec = bench.fit(plain, state.generation + 1).spare
    except ApplianceError as error:
        return Wish(None, why_not=f"none: {error}")
    return Wish(spec, state.answering, "" if spec is not None else f"none: the {backend.name} engine cannot have one")
