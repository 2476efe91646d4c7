"""The appliance itself: configuration, model, engine, port."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path

from appliance.cli.checks.configured import check_files, check_programs, socket_unit_listens
from appliance.cli.checks.machine import Finding, Machine, fail, ok, warn
from appliance.cli.place import Place
from appliance.config import Config
from appliance.config.runtimes import current_runtime, engine_is_here
from appliance.control import client
from appliance.core.errors import ApplianceError, ConfigError
from appliance.core.states import EngineState
from appliance.listening import holder_of, is_taken


def check_box(machine: Machine, place: Place, state_dir: Path) -> Iterator[Finding]:
    """Without a readable configuration the rest has no meaning."""
    try:
        config = place.load().config
    except ConfigError as error:
        for line in str(error).splitlines():
            yield fail("configuration", line, "edit it; appliancectl config check")
        return
    yield ok("configuration", str(place.config_file() or "built-in defaults"))
    yield from check_model(config)
    yield from check_engine(config, state_dir)
    yield from check_files(config)
    yield from check_programs(config)
    yield _port(machine, config)
    yield from _applianced(place)


def check_model(config: Config) -> Iterator[Finding]:
    """Whether its files are there, by their names."""
    if not config.model.path:
        yield warn("model", "model.path is not set", "appliancectl setup --model DIR, or --demo")
        return
    folder = Path(config.model.path)
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
    missing = [] if any(name.endswith(".gguf") for name in weights) else sorted({"config.json", "tokenizer.json"} - names)
    missing += sorted(_shards(folder) - names)
    empty = sorted(name for name in weights if not (folder / name).stat().st_size)
    if missing or empty or not weights:
        words = [f"lacks {', '.join(missing)}"] if missing else []
        words += [f"{', '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty"] if empty else []
        yield fail("model", f"{folder} {' and '.join(words or ['holds no weights'])}", cure)
    else:
        yield ok("model", str(folder))


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
    if config.engine.python:
        if os.access(config.engine.python, os.X_OK):
            yield ok("engine", config.engine.python)
        else:
            reason = f"engine.python = {config.engine.python!r} cannot be run"
            yield fail("engine", reason, "correct it, or remove it and run appliancectl setup")
    elif engine_is_here():
        yield ok("engine", "part of this installation")
    elif (runtime := current_runtime(state_dir)) is None:
        yield fail("engine", "the built-in engine is not set up", "appliancectl setup")
    elif runtime.name != f"native-{importlib.metadata.version('llm-appliance')}":
        yield warn("engine", f"{runtime.name} serves, which is not this package's version", "appliancectl setup, then appliancectl restart")
    else:
        yield ok("engine", str(runtime))


def _port(machine: Machine, config: Config) -> Finding:
    port = config.gateway.port
    if socket_unit_listens(machine):
        if is_taken(port):
            return ok("port", f"{port} is held by llm-appliance-gateway.socket")
        cure = "systemctl daemon-reload; systemctl restart llm-appliance-gateway.socket"
        return fail("port", f"nobody listens on {port}: gateway.port was changed", cure)
    if is_taken(port):
        return warn("port", f"{port} is taken by {holder_of(port)}", "stop that, or set gateway.port to another")
    return ok("port", f"{port} is free")


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
