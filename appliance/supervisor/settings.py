"""The numbers that the reducer and the policy go by, taken out of the configuration once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from appliance.config.schema import Config


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """See the keys of the same names in appliance/config/."""

    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    stable_after_s: float = 3600.0
    start_failures_max: int = 3
    start_stall_s: float = 30.0
    stop_deadline_s: float = 30.0
    drain_s: float = 30.0
    gpu_required: bool = False
    climb_after_s: float = 0.0

    @classmethod
    def of(cls, config: Config) -> MachineSettings:
        """From the effective configuration."""
        supervisor = config.supervisor
        return cls(
            backoff_first_s=supervisor.backoff_first_s,
            backoff_max_s=supervisor.backoff_max_s,
            stable_after_s=supervisor.stable_after_s,
            start_failures_max=supervisor.start_failures_max,
            start_stall_s=supervisor.start_stall_s,
            stop_deadline_s=supervisor.stop_deadline_s,
            drain_s=config.gateway.drain_s,
            gpu_required=config.gpu.mode == "required",
            climb_after_s=config.ladder.climb_after_s,
        )


def fingerprint(config: Config) -> str:
    """Names what is served and how: a history of failures is about one such configuration. A spare changes nothing of it."""
    engine = replace(config.engine, warm_spare=True)
    between_cards = () if config.gpu.p2p == "auto" else (config.gpu.p2p,)
    return hashlib.sha256(repr((config.model, engine, config.budget, *between_cards)).encode()).hexdigest()[:16]
