"""What a configuration names, looked at before anything is started with it: files, programs, model, memory, folder, port.

A `fail` would end a start, a `warn` would not, or not at once. Each finding is called after its key.
"""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from appliance import flags
from appliance.cli.checks.cards import nvidia_cards
from appliance.cli.checks.machine import Finding, Machine, barrier_of, fail, unseen, warn
from appliance.cli.place import SYSTEM_STATE_DIR
from appliance.config import Config
from appliance.config.api_keys import read_api_keys, read_fallback_key
from appliance.config.certificates import load_pair
from appliance.config.runtimes import installed_version, libraries_of
from appliance.core.errors import ApplianceError, ConfigError
from appliance.core.plan import GpuFacts
from appliance.core.units import MIB, format_bytes
from appliance.core.versions import version_of
from appliance.listening import UNSEEN_HOLDER, AddressTaken, bind, is_open_to_others, too_open

STATE_WARN_BYTES = 64 * MIB
"""Incidents and the traffic profile of a month fit into it."""
_READABLE = "name a file that the appliance's user can read"


def check_files(config: Config) -> Iterator[Finding]:
    """Keys, certificates, patterns."""
    gateway, fallback = config.gateway, config.fallback
    if gateway.api_keys_file:
        keys = Path(gateway.api_keys_file)
        yield from _read("gateway.api_keys_file", (keys,), lambda: read_api_keys(keys))
    if gateway.tls_certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = Path(gateway.tls_certificate), Path(gateway.tls_key)
        yield from _read("gateway.tls_certificate", pair, lambda: load_pair(context, *pair))
    if fallback.api_key_file:
        yield from _read("fallback.api_key_file", (Path(fallback.api_key_file),), lambda: read_fallback_key(fallback.api_key_file))
    folder = Path(config.diagnosis.patterns_dir)
    if not config.diagnosis.patterns_dir:
        return
    if (barrier := barrier_of(folder)) is not None:
        yield unseen("diagnosis.patterns_dir", folder, barrier)
    elif any(folder.glob("*.toml")):
        from appliance.diagnosis import with_operator_patterns  # half a second, so only for who has patterns

        for problem in with_operator_patterns(folder)[1]:
            yield warn("diagnosis.patterns_dir", problem, "mend that pattern; until then it is left out")


def check_programs(config: Config) -> Iterator[Finding]:
    """What is run: the owner's engine and hooks. The built-in engine: checks/box.py."""
    engine, supervisor = config.engine, config.supervisor
    if engine.command and not _is_program(engine.command[0]):
        reason, cure = f"{engine.command[0]!r} is no program that can be run", "write the whole path of your engine's program"
        yield _hidden("engine.command", engine.command[0]) or fail("engine.command", reason, cure)
    if supervisor.on_park and not _is_program(supervisor.on_park[0]):
        yield _hidden("supervisor.on_park", supervisor.on_park[0]) or warn(
            "supervisor.on_park", f"{supervisor.on_park[0]!r} is no program that can be run", "nobody would be told: correct it"
        )
    if supervisor.auto_reboot != "never" and not (supervisor.reboot_command and _is_program(supervisor.reboot_command[0])):
        reason = f"supervisor.auto_reboot is {supervisor.auto_reboot!r} and {list(supervisor.reboot_command)!r} cannot be run"
        yield warn("supervisor.reboot_command", reason, "name the program that reboots this machine")


def check_engine_of_others(config: Config) -> Iterator[Finding]:
    """Whether SGLang, vLLM or llama.cpp is where the configuration says."""
    engine = config.engine
    if engine.backend == "llamacpp" and not _is_program(engine.program or "llama-server"):
        what = f"{engine.program!r} is no program that can be run" if engine.program else "not set, and no llama-server is in PATH"
        yield _hidden("engine.program", engine.program) or fail(
            "engine.program", what, "write the whole path of llama-server, or: appliancectl runtime install llamacpp"
        )
    if engine.backend in ("sglang", "vllm"):
        has_engine = not libraries_of(engine.python) or installed_version(engine.python, engine.backend)
        if not _is_program(engine.python) or not has_engine:
            reason = f"{engine.python!r} is not the interpreter of an environment with {engine.backend}"
            cure = f"appliancectl runtime install {engine.backend}, or name one that is"
            yield _hidden("engine.python", engine.python) or fail("engine.python", reason, cure)


def check_options(config: Config) -> Iterator[Finding]:
    """What engine.extra_args says to an engine that others wrote."""
    engine = config.engine
    if engine.backend not in flags.ENGINES or engine.backend == "native":
        return
    rules = flags.rules_of(engine.backend)
    version = version_of(engine.version or installed_version(engine.python, engine.backend), rules.newest)
    for remark in rules.remarks(engine.extra_args, version):
        if remark.is_refusal:
            yield fail("engine.extra_args", remark.sentence, "do that, and remove it from engine.extra_args")
        else:
            yield warn("engine.extra_args", remark.sentence, "leave it out unless that is what you want")


def check_memory(config: Config, model: Path | None) -> Iterator[Finding]:
    """The built-in engine's KV pool against this machine's memory; with a model, beside its weights, and the context against its limit."""
    if config.engine.backend != "native":
        return
    from appliance.cli.plan_facts import AUTO, find_gpu
    from appliance.planner import native
    from appliance.planner.inputs import PlanInputs
    from appliance.planner.model_files import model_facts

    memory, pool_bytes, weight_bytes = find_gpu(AUTO, "native"), config.engine.kv_pool_bytes, 0
    if model is not None:
        try:
            facts = model_facts(model)
        except ApplianceError as error:
            yield fail("model.path", error.message, error.hint or "name another folder")
            return
        weight_bytes = native.weights(native.resolve(PlanInputs(facts, memory, "native"))).size_bytes
        asked, limit = config.engine.context_length_tokens, facts.max_context_tokens
        if asked > limit:
            yield fail("engine.context_length_tokens", f"{asked:,} tokens: the model's own limit is {limit:,}", "lower it, or set it to 0")
    yield from _check_pool(pool_bytes, weight_bytes, native.PROCESS_BYTES, memory)


def _check_pool(pool_bytes: int, weight_bytes: int, process_bytes: int, memory: GpuFacts) -> Iterator[Finding]:
    """Weights that are mapped could be read from the disk again and again, so what fails for certain is a pool that no memory holds."""
    beside = f" beside {format_bytes(weight_bytes)} of weights" if weight_bytes else ""
    words = f"{format_bytes(pool_bytes)}{beside} and {format_bytes(process_bytes)} of the process"
    free_bytes = memory.total_bytes if memory.free_at_start_bytes is None else memory.free_at_start_bytes
    cure = "lower it; appliancectl plan --engine native --model MODEL says what fits"
    if pool_bytes + process_bytes > memory.total_bytes:
        yield fail("engine.kv_pool_bytes", f"{words}: this machine has {format_bytes(memory.total_bytes)}", cure)
    elif pool_bytes + process_bytes + weight_bytes > free_bytes:
        yield warn("engine.kv_pool_bytes", f"{words}: {format_bytes(free_bytes)} of memory are free now", cure)


def check_layout(machine: Machine, config: Config) -> Iterator[Finding]:
    """Whether this box has the cards that gpu.layout and engine.tensor_parallel share out."""
    engine, layout, count = config.engine, config.gpu.layout, len(nvidia_cards(machine))
    seen = {0: "no NVIDIA card", 1: "one card"}.get(count, f"{count} cards")
    computes_there = engine.backend != "native" or engine.device == "cuda"
    on_cards = config.gpu.mode != "off" and (computes_there or config.gpu.mode == "required")
    if layout in ("tp", "replicas") and not on_cards:
        why = "gpu.mode is off" if config.gpu.mode == "off" else f"the {engine.backend} engine computes on the CPU"
        yield warn("gpu.layout", f'"{layout}" has no effect: {why}', "remove it; there is one engine")
    elif layout in ("tp", "replicas") and count < 2:
        yield warn("gpu.layout", f'"{layout}" shares out several cards, and this machine has {seen}', "remove it; there is one engine")
    if on_cards and 0 < count < engine.tensor_parallel:
        reason = f"{engine.tensor_parallel} cards share the model, and this machine has {seen}"
        cure = f"set it to {count}, or bring the other cards back: until then the rung for fewer cards is started, where there is one"
        yield warn("engine.tensor_parallel", reason, cure)


def check_state_dir(state_dir: Path) -> Iterator[Finding]:
    """Whether incidents can be kept there, by whoever asks."""
    folder = state_dir.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    cure = "name another with --state-dir"
    if not folder.is_dir():
        yield fail("state folder", f"{state_dir}: {folder} is no folder", cure)
        return
    facts = os.statvfs(folder)
    free_bytes = facts.f_bavail * facts.f_frsize
    if facts.f_flag & os.ST_RDONLY:
        yield fail("state folder", f"{state_dir} is on a file system that is mounted read-only", f"mount it for writing, or {cure}")
    elif state_dir != SYSTEM_STATE_DIR and not os.access(folder, os.W_OK | os.X_OK):  # that one is the service user's
        yield fail("state folder", f"{folder} may not be written by this user", f"run this as the user that serves, or {cure}")
    elif free_bytes < STATE_WARN_BYTES:
        words = f"{format_bytes(free_bytes)} are free in {folder}, under {format_bytes(STATE_WARN_BYTES)}"
        yield warn("state folder", f"{words}: incidents may not be kept", "free some space")


def socket_unit_listens(machine: Machine) -> bool:
    """Whether systemd holds the port for the gateway."""
    return machine.ask("systemctl", "is-active", "--quiet", "llm-appliance-gateway.socket").good


def check_address(machine: Machine, config: Config) -> Iterator[Finding]:
    """Whether gateway.host and gateway.port can be listened on. An appliance that does so already is no trouble, nor its systemd."""
    gateway = config.gateway
    try:
        with bind(gateway.host, 0) as held:  # whoever has the port now, it must not be opened
            if is_open_to_others(held) and not (gateway.allow_open or gateway.api_keys_file):
                raise too_open(f"{gateway.host}:{gateway.port}")
        bind(gateway.host, gateway.port).close()
    except AddressTaken as error:
        may_be_systemd = error.holder in ("systemd (pid 1)", UNSEEN_HOLDER)
        if not (may_be_systemd and socket_unit_listens(machine)) and "appliance" not in error.holder:
            yield fail("gateway.port", error.message, error.hint or "")
    except ApplianceError as error:
        yield fail("gateway.host", error.message, error.hint or "")


def _read(key: str, files: Sequence[Path], read: Callable[[], object]) -> Iterator[Finding]:
    for file in files:
        if (barrier := barrier_of(file)) is not None:
            yield unseen(key, file, barrier)
            return
    try:
        read()
    except ConfigError as error:
        for line in error.message.splitlines():
            yield fail(key, line.removeprefix(f"{key} = "), error.hint or _READABLE)


def _hidden(key: str, program: str) -> Finding | None:
    """Where it may be a program for the user that serves, and this user cannot tell."""
    barrier = barrier_of(Path(program)) if "/" in program else None
    return unseen(key, Path(program), barrier) if barrier is not None else None


def _is_program(name: str) -> bool:
    return shutil.which(name) is not None
