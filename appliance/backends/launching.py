"""What the launch of every engine has in common: where it runs, when it is given up, what it is assumed to take until it says so itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from appliance.config.schema import Config
from appliance.core.launch import ContinuesBy, Endpoint, EngineLimits, LaunchSpec, SpareSpec
from appliance.core.plan import Rung

PROBE_PATH = "/health"


def served_name(config: Config) -> str:
    """The id that clients use."""
    return config.model.name or (Path(config.model.path).resolve().name if config.model.path else "model")


def unix_socket(run_dir: Path, generation: int) -> Endpoint:
    """Of one life: a request for the one before cannot reach the next."""
    return Endpoint(socket_path=str(run_dir / f"engine-{generation}.sock"))


def launched(
    config: Config,
    rung: Rung,
    run_dir: Path,
    endpoint: Endpoint,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    *,
    notes: tuple[str, ...] = (),
    runtime: str = "",
    spare: SpareSpec | None = None,
    holder: SpareSpec | None = None,
) -> LaunchSpec:
    """The spec of the configured engine's command line."""
    return LaunchSpec(
        argv=argv,
        env=env,
        cwd=str(run_dir),
        endpoint=endpoint,
        probe_path=PROBE_PATH,
        start_deadline_s=config.supervisor.start_deadline_s,
        stop_deadline_s=config.supervisor.stop_deadline_s,
        engine=config.engine.backend,
        rung=rung,
        spare=spare,
        holder=holder,
        notes=notes,
        runtime=runtime,
    )


def assumed_limits(config: Config, rung: Rung, continues_by: ContinuesBy = ContinuesBy.REPLAY) -> EngineLimits:
    """Of the rung; the engine says more."""
    return EngineLimits(served_name(config), rung.context_length_tokens, rung.max_running, 0, continues_by=continues_by)
