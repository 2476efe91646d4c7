"""llama.cpp's llama-server with a GGUF file, on a unix socket. Read and run at b10434.

Its own warm-up is left out: it takes seconds, and our proof warms it up as well. Verbosity 4 tells what its memory is made of; prompts
begin at 5. Its cache of old prompts in host memory (8 GiB, if nothing is said) is off: nobody has planned for it.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from appliance.backends.gguf_header import MAGIC, context_length
from appliance.backends.launching import assumed_limits, launched, served_name, unix_socket
from appliance.backends.model_folder import named_path
from appliance.backends.prompts import completion, longest
from appliance.backends.protocol import Counters, ProofRequest, Voice, WorstPrompt, configured_rung, count_in, json_object
from appliance.backends.wording import OFFLINE, environment_of, judged_extra_args, told, version_in_use, words_of
from appliance.config.runtimes import LLAMA_SERVER, launch_program, runtime_of
from appliance.config.schema import Config, EngineTable
from appliance.core.errors import ConfigError, ModelError
from appliance.core.launch import ContinuesBy, EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.versions import Version

CHUNK_TOKENS = 256
"""Half of its own: on a CPU nothing is lost by it, and others wait half as long."""
_UNCACHED = {"cache_prompt": False}
_SAMPLE = r"^llamacpp:{} (\S+)$"
_FIGURES = {
    name: re.compile(_SAMPLE.format(name).encode(), re.MULTILINE) for name in ("n_decode_total", "requests_processing", "requests_deferred")
}


class LlamacppBackend:
    """See Backend. It takes a card where its build can use one, and the CPU else."""

    name = "llamacpp"
    uses_gpu = True

    def __init__(self, engine: EngineTable) -> None:
        self._engine = engine

    @property
    def version(self) -> str:
        """The build; empty for one that is not in an environment of ours."""
        return self._engine.version or _build(self._engine)

    @property
    def voice(self) -> Voice:
        """/metrics counts batches. One of 512 tokens of a small model was seen to take 12 s on two busy cores."""
        return Voice("/metrics", counters_of, (("/props", limits_of),), whole_batches=True)

    def first_rung(self, config: Config) -> Rung:
        """As configured; without a context, that of the file."""
        context = config.engine.context_length_tokens or context_length(_file(Path(config.model.path)) or Path())
        rung = configured_rung(config, context, config.engine.kv_dtype, CHUNK_TOKENS)
        return replace(rung, tensor_parallel=config.engine.tensor_parallel)

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """Its options and variables."""
        return told(config, rung, _version(config))

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """Raises ModelError and ConfigError."""
        program, model = _program(config), _checked_file(config)
        version = _version(config)
        notes = judged_extra_args(config, version)
        words = words_of(config, rung, version)
        endpoint = unix_socket(run_dir, generation)
        threads = str(config.engine.threads or len(os.sched_getaffinity(0)))
        argv = (
            program,
            "--model", str(model),
            "--alias", served_name(config),
            "--host", str(endpoint.socket_path),
            "--threads", threads,
            "--threads-http", str(max(4, rung.max_running + 3)),
            "--metrics",
            "--no-webui",
            "--cache-ram", "0",
            "--no-warmup",
            "--verbosity", "4",
            *words.arguments,
            *config.engine.extra_args,
        )  # fmt: skip
        env = environment_of(config, words, OFFLINE, str(Path(program).parent))
        return launched(config, rung, run_dir, endpoint, argv, env, notes=notes, runtime=runtime_of(program))

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """One greedy token."""
        return (completion(config, "The", **_UNCACHED),)

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """The whole context but for one token of answer."""
        return longest(limits.context_length_tokens - 1, lambda ids: completion(config, ids, **_UNCACHED))

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """Of the rung; the engine says more."""
        return assumed_limits(config, rung, ContinuesBy.MESSAGE)


def counters_of(body: bytes) -> Counters:
    """Of /metrics: each llama_decode is a batch."""
    found = {name: pattern.search(body) for name, pattern in _FIGURES.items()}
    figures = {name: int(float(match[1])) for name, match in found.items() if match is not None}
    if "requests_processing" not in figures:
        return Counters()
    return Counters(
        figures.get("n_decode_total"), figures["requests_processing"], figures.get("requests_deferred", 0), counts_requests=True
    )


def limits_of(body: bytes, assumed: EngineLimits) -> EngineLimits:
    """Of /props: slots, and the context of one. All share one cache of that size (--kv-unified)."""
    said = json_object(body)
    defaults = said.get("default_generation_settings")
    context = (count_in(defaults, "n_ctx") if isinstance(defaults, dict) else None) or assumed.context_length_tokens
    running = count_in(said, "total_slots") or assumed.max_running
    return EngineLimits(assumed.model_id, context, running, context, continues_by=assumed.continues_by)


def _program(config: Config) -> str:
    named = config.engine.program
    wanted = launch_program(named) if named else LLAMA_SERVER
    program = shutil.which(wanted) if wanted is not None else None
    if program is None:
        what = f"engine.program = {named!r} is no program" if named else "there is no llama-server in PATH and engine.program is not set"
        raise ConfigError(what, hint="set engine.program to the path of llama-server, or: appliancectl runtime install llamacpp")
    return str(Path(program).absolute())


def _version(config: Config) -> Version:
    return version_in_use(config, _build(config.engine))


def _build(engine: EngineTable) -> str:
    """It is in its environment's name."""
    program = launch_program(engine.program) if engine.program else None
    return runtime_of(program or "").removeprefix("llamacpp-")


def _checked_file(config: Config) -> Path:
    """The GGUF file that is named, or the only one, or the first of a split one, in the folder that is. Raises ModelError."""
    path = named_path(config)
    file = _file(path)
    if file is None:
        several = any(path.glob("*.gguf"))
        raise ModelError(f"{path} holds {'several' if several else 'no'} GGUF files", hint="name one in model.path")
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != MAGIC:
        raise ModelError(f"{file} is no GGUF file: it begins with {start!r}", hint="download it again, or convert it")
    return file.resolve()


def _file(path: Path) -> Path | None:
    there = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    files = there if len(there) == 1 else [file for file in there if re.search(r"-0*1-of-\d+\.gguf$", file.name)]
    return files[0] if len(files) == 1 else None
