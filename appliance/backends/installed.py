"""Which version of an engine an interpreter's environment holds, without starting it."""

from __future__ import annotations

from pathlib import Path

from appliance.config.runtimes import launch_python
from appliance.config.schema import Config
from appliance.core.errors import ConfigError


def engine_python(config: Config, distribution: str) -> str:
    """The interpreter that has the engine.

    Raises:
        ConfigError: its environment does not have it.
    """
    python = launch_python(config.engine.python)
    cure = f"set engine.python to the interpreter of an environment with {distribution}, such as /opt/{distribution}/bin/python"
    if python is None or not Path(python).exists():
        raise ConfigError(f"engine.python = {config.engine.python!r} does not exist", hint=cure)
    if _libraries(python) and not installed_version(python, distribution):
        raise ConfigError(f"the environment of {python} has no {distribution}", hint=cure)
    return python


def installed_version(python: str, distribution: str) -> str:
    """By the metadata beside its libraries; empty where there is none to be seen, and for no interpreter."""
    name = distribution.replace("-", "_")
    for libraries in _libraries(python):
        found = sorted(libraries.glob(f"{name}-*.dist-info"))
        if found:
            return found[-1].name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return ""


def environment_bin(python: str) -> str:
    """Its programs: compilers of kernels, such as ninja, are looked for in PATH."""
    return str(Path(python).absolute().parent)


def _libraries(python: str) -> list[Path]:
    if not python:
        return []
    # Not resolved: bin/python of a virtual environment is a link to the system's interpreter.
    return sorted(Path(python).absolute().parent.parent.glob("lib/python3*/site-packages"))
