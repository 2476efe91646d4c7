"""Where engines' environments lie in the state folder, and which interpreter starts the built-in engine.

runtimes/native-0.1.0/   one environment, whole, never changed afterwards
runtimes/current         a link to the one in force
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from appliance.config.schema import Config

RUNTIMES = "runtimes"
CURRENT = "current"


def current_runtime(state_dir: Path) -> Path | None:
    """The environment in force, by its own name: an engine that runs from it stays in it when the link moves on."""
    link = state_dir / RUNTIMES / CURRENT
    try:
        runtime = link.resolve(strict=True)
    except OSError:
        return None
    return runtime if (runtime / "bin" / "python").exists() else None


def with_runtime(config: Config, state_dir: Path) -> Config:
    """`engine.python` filled in with the runtime in force, where the owner named none and there is one."""
    if config.engine.python or (runtime := current_runtime(state_dir)) is None:
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, python=str(runtime / "bin" / "python")))
