"""The interpreter of an engine's environment."""

from __future__ import annotations

from pathlib import Path

from appliance.config.runtimes import installed_version, launch_python, libraries_of
from appliance.config.schema import Config
from appliance.core.errors import ConfigError


def engine_python(config: Config, distribution: str) -> str:
    """The interpreter that has the engine.

    Raises:
        ConfigError: its environment does not have it.
    """
    python = launch_python(config.engine.python)
    cure = f"appliancectl runtime install {distribution}, or set engine.python to the interpreter of an environment that has it"
    if python is None or not Path(python).exists():
        raise ConfigError(f"engine.python = {config.engine.python!r} does not exist", hint=cure)
    if libraries_of(python) and not installed_version(python, distribution):
        raise ConfigError(f"the environment of {python} has no {distribution}", hint=cure)
    return python


def environment_bin(python: str) -> str:
    """Its programs: compilers of kernels, such as ninja, are looked for in PATH."""
    return str(Path(python).absolute().parent)
