"""Where engines' environments lie in the state folder, and which of them starts an engine.

runtimes/native-0.1.0/    one environment, whole, never changed afterwards
runtimes/current          a link to the built-in engine's in force
runtimes/sglang-0.5.23/   the same of an engine that others wrote
runtimes/current-sglang   and the one in force
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

from appliance.config.schema import Config, EngineTable
from appliance.core.versions import Version, version_of

RUNTIMES = "runtimes"
CURRENT = "current"
LLAMA_SERVER = "llama-server"
_OUR_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PYTHON_NAME = re.compile(r"python3\.\d+")


def engine_is_here() -> bool:
    """Whether this interpreter has the built-in engine, as in a checkout; the packaged control plane comes without."""
    return importlib.util.find_spec("appliance.engine") is not None


def engine_of(runtime_name: str) -> str:
    """ "vllm-cpu-0.32.0" → "vllm": the word in engine.backend."""
    return runtime_name.partition("-")[0]


def link_of(engine: str) -> str:
    """Name of the link to the environment in force of an engine."""
    return CURRENT if engine == "native" else f"{CURRENT}-{engine}"


def current_runtime(state_dir: Path, engine: str = "native") -> Path | None:
    """The environment in force, by its own name; None where there is none that can be run.

    One that was made with another Python, before the distribution was upgraded, cannot: its libraries are not found any more.
    """
    try:
        runtime = (state_dir / RUNTIMES / link_of(engine)).resolve(strict=True)
    except OSError:
        return None
    return runtime if can_run(runtime) else None


def can_run(runtime: Path) -> bool:
    """Whether its interpreter is there, and finds its libraries."""
    python = runtime / "bin" / "python"
    resolved = python.resolve().name  # a link to the system's interpreter, which has its version in its name
    return python.exists() and (runtime / "lib" / (resolved if _PYTHON_NAME.fullmatch(resolved) else _OUR_PYTHON)).is_dir()


def put_in_force(runtime: Path) -> None:
    """For engines that start from now on: one rename, so that there is always one."""
    link = link_of(engine_of(runtime.name))
    fresh = runtime.parent / f".{link}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(runtime.name)
    fresh.replace(runtime.parent / link)


def runtime_of(program: str) -> str:
    """The name of the environment that an interpreter or program belongs to; empty where it is none of ours."""
    parts = Path(program).parts
    return parts[-3] if parts[-4:-3] == (RUNTIMES,) else ""


def name_in_force(engine: EngineTable) -> str:
    """The name of the environment that the engine goes by, also of one that is gone or cannot be run; empty where it goes by none, or where
    the link itself is gone."""
    program = engine.program or engine.python
    if not runtime_of(program):
        return ""
    folder = Path(program).parents[1]
    if folder.is_symlink():
        return folder.readlink().name
    return "" if folder.name.startswith(CURRENT) else folder.name


def go_back(configured: str, name: str) -> None:
    """Put another one in force where the link is that `with_runtime` has filled in.

    Raises:
        OSError: it is not there any more, or the link cannot be changed.
    """
    runtime = Path(configured).parents[2] / name
    (runtime / "bin" / "python").stat()
    put_in_force(runtime)


def earlier_runtime(configured: str) -> Path | None:
    """The environment before the one in force: of the same engine, the highest version below it that can be run.

    None where there is no older one, and where `configured` does not go by the link to the one in force: then the owner chose it.
    """
    link = Path(configured).parts[-3:-2]
    program = launch_program(configured) if link and link[0].startswith(CURRENT) else None
    now = runtime_of(program) if program is not None else ""
    if program is None or not now:
        return None
    others = (one for one in Path(program).parents[2].iterdir() if engine_of(one.name) == engine_of(now) and not one.is_symlink())
    older = {_version(one.name): one for one in others if _version(one.name) < _version(now) and can_run(one)}
    return older[max(older)] if older else None


def _version(runtime_name: str) -> Version:
    return version_of(runtime_name.rpartition("-")[2], (0,))


def with_runtime(config: Config, state_dir: Path) -> Config:
    """`engine.python` and `engine.program` filled in with the runtime's, where the owner named none. It may be made, or change, while we
    run."""
    engine = config.engine
    current = state_dir / RUNTIMES / link_of(engine.backend)
    named = engine.program if engine.backend == "llamacpp" else engine.python
    comes_with_us = engine.backend == "native" and not engine_is_here()
    if engine.backend == "custom" or named or not (comes_with_us or current.is_symlink()):
        return config
    python = str(current / "bin" / "python")
    program = str(current / "bin" / LLAMA_SERVER) if engine.backend == "llamacpp" else engine.program
    return dataclasses.replace(config, engine=dataclasses.replace(engine, python=python, program=program))


def launch_python(configured: str) -> str | None:
    """What to start an engine with: the runtime by its own name, so that a running engine stays in it when the link moves on.

    None where the runtime is not there.
    """
    return launch_program(configured) if configured else sys.executable


def launch_program(configured: str) -> str | None:
    """The same for any program of an environment's `bin`."""
    program = Path(configured)
    link = program.parts[-3] if len(program.parts) > 3 else ""
    if program.parts[-4:-3] != (RUNTIMES,) or not (link == CURRENT or link.startswith(f"{CURRENT}-")):
        return configured
    runtime = current_runtime(program.parents[3], link.removeprefix(CURRENT).removeprefix("-") or "native")
    return str(runtime / "bin" / program.name) if runtime is not None else None


def installed_version(python: str, distribution: str) -> str:
    """By the metadata beside its libraries; empty where there is none to be seen, and for no interpreter.

    A build for CPUs is the same engine under another name, such as vllm-cpu.
    """
    packages = packages_of(python)
    return packages.get(distribution) or packages.get(f"{distribution}-cpu") or ""


def packages_of(python: str) -> dict[str, str]:
    """What an interpreter's environment has, name → version, by the metadata beside its libraries."""
    found: dict[str, str] = {}
    for libraries in libraries_of(python):
        for info in sorted(libraries.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            found[name.lower().replace("_", "-").replace(".", "-")] = version
    return found


def libraries_of(python: str) -> list[Path]:
    """Where an interpreter's environment has its packages, without starting it."""
    if not python:
        return []
    # Not resolved: bin/python of a virtual environment is a link to the system's interpreter.
    return sorted(Path(python).absolute().parent.parent.glob("lib/python3*/site-packages"))
