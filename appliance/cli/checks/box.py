"""The appliance itself: configuration, model, engine, port."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path

from appliance.cli.checks.configured import check_files, check_programs
from appliance.cli.checks.door import check_door
from appliance.cli.checks.machine import Finding, Machine, barrier_of, fail, ok, unseen, warn
from appliance.cli.models import DEMO_MODEL, MODELS
from appliance.cli.place import SYSTEM_STATE_DIR, Place
from appliance.config import Config
from appliance.config.runtimes import RUNTIMES, current_runtime, engine_is_here
from appliance.control import client
from appliance.core.errors import ApplianceError, ConfigError
from appliance.core.states import EngineState


def check_box(machine: Machine, place: Place, state_dir: Path) -> Iterator[Finding]:
    """Without a readable configuration the rest has no meaning."""
    try:
        config = place.load().config
    except ConfigError as error:
        for line in str(error).splitlines():
            yield fail("configuration", line, "edit it; appliancectl config check")
        return
    yield ok("configuration", str(place.config_file() or "built-in defaults"))
    yield from check_model(config, state_dir)
    yield from check_engine(config, state_dir)
    yield from check_files(config)
    yield from check_programs(config)
    yield check_door(machine, config)
    yield from _applianced(place)


def check_model(config: Config, state_dir: Path) -> Iterator[Finding]:
    """Whether its files are there, by their names."""
    if not config.model.path and _serves_demo(state_dir):
        yield ok("model", f"{state_dir / MODELS / DEMO_MODEL}: the demo model, because model.path is not set")
        return
    if not config.model.path:
        yield warn("model", "model.path is not set", "appliancectl setup --model DIR, or --demo")
        return
    folder = Path(config.model.path)
    if (barrier := barrier_of(folder)) is not None:
        yield unseen("model", folder, barrier)
        return
    cure = "correct model.path, or bring the model again"
    if config.engine.backend == "llamacpp" and folder.is_file():
        yield ok("model", str(folder))
        return
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        yield fail("model", f"{folder}: {error.strerror}", cure)
        return
    weights = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if (barrier := next((found for name in weights if (found := barrier_of(folder / name)) is not None), None)) is not None:
        yield unseen("model", folder, barrier)
        return
    missing = [] if any(name.endswith(".gguf") for name in weights) else sorted({"config.json", "tokenizer.json"} - names)
    missing += sorted(_shards(folder) - names)
    empty = sorted(name for name in weights if not (folder / name).stat().st_size)
    if missing or empty or not weights:
        words = [f"lacks {', '.join(missing)}"] if missing else []
        words += [f"{', '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty"] if empty else []
        yield fail("model", f"{folder} {' and '.join(words or ['holds no weights'])}", cure)
    else:
        yield ok("model", str(folder))


def _serves_demo(state_dir: Path) -> bool:
    """As `appliancectl run` does where no model is named; the service does not."""
    demo = state_dir / MODELS / DEMO_MODEL
    return state_dir != SYSTEM_STATE_DIR and barrier_of(demo) is None and (demo / "config.json").is_file()


def _shards(folder: Path) -> set[str]:
    """The files that the index of a sharded model names."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def check_engine(config: Config, state_dir: Path) -> Iterator[Finding]:
    """Whether the built-in engine can be started, and which one that is."""
    if config.engine.backend != "native":
        return
    runtimes = state_dir / RUNTIMES
    if config.engine.python:
        if (barrier := barrier_of(Path(config.engine.python))) is not None:
            yield unseen("engine", Path(config.engine.python), barrier)
        elif os.access(config.engine.python, os.X_OK):
            yield ok("engine", config.engine.python)
        else:
            reason = f"engine.python = {config.engine.python!r} cannot be run"
            yield fail("engine", reason, "correct it, or remove it and run appliancectl setup")
    elif engine_is_here():
        yield ok("engine", "part of this installation")
    elif (barrier := barrier_of(runtimes)) is not None:
        yield unseen("engine", runtimes, barrier)
    elif (runtime := current_runtime(state_dir)) is None:
        yield _not_set_up(state_dir)
    elif runtime.name != f"native-{importlib.metadata.version('llm-appliance')}":
        yield warn("engine", f"{runtime.name} serves, which is not this package's version", "appliancectl setup, then appliancectl restart")
    else:
        yield ok("engine", str(runtime))


def _not_set_up(state_dir: Path) -> Finding:
    """Where: whoever runs a second appliance beside the box's own has to set that one up."""
    reason = f"the built-in engine is not set up in {state_dir}"
    if state_dir != SYSTEM_STATE_DIR and current_runtime(SYSTEM_STATE_DIR) is not None:
        cure = f"systemctl start llm-appliance serves with this box's own, of {SYSTEM_STATE_DIR}; for one of your own: "
        return fail("engine", reason, f"{cure}appliancectl --state-dir {state_dir} setup --demo")
    return fail("engine", reason, "appliancectl setup" if state_dir == SYSTEM_STATE_DIR else f"appliancectl --state-dir {state_dir} setup")


def _applianced(place: Place) -> Iterator[Finding]:
    try:
        answer = client.ask(place.control_socket(), "status")
    except ApplianceError as error:
        yield ok("applianced", f"not asked: {error.message}")
        return
    sentence = str(answer["sentence"])
    if answer["state"] == EngineState.PARKED.value:
        yield fail("applianced", sentence, "mend that, then appliancectl resume")
    else:
        yield ok("applianced", sentence)
    for name, reading in (answer.get("sensors") or {}).items():
        if not reading["ok"]:
            yield warn(name.replace("_", " "), str(reading["detail"]), "diagnosis goes without it until that is mended")
