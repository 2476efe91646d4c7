"""The built-in engine: `python -m appliance.engine` in an environment that has torch. On the CPU, or on a card (`engine.device`)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.backends.environment import engine_environment
from appliance.backends.launching import assumed_limits, launched, served_name, unix_socket
from appliance.backends.prompts import longest
from appliance.backends.protocol import OWN_VOICE, ProofRequest, WorstPrompt, configured_rung
from appliance.backends.wording import version_in_use, words_of
from appliance.config.runtimes import launch_python, runtime_of
from appliance.config.schema import Config, EngineTable
from appliance.core.errors import ConfigError, ModelError
from appliance.core.launch import WEIGHTS_SOCKET, EngineLimits, LaunchSpec, SpareSpec
from appliance.core.plan import Rung
from appliance.core.units import format_bytes

_MODEL_SUFFIXES = (".json", ".safetensors", ".jinja")

PROOF = ProofRequest(
    "/generate",
    {"text": "The", "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}},
    lambda answer: isinstance(answer.get("text"), str) and isinstance(answer.get("output_ids"), list),
)


class NativeBackend:
    """See Backend."""

    name = "native"
    voice = OWN_VOICE

    def __init__(self, engine: EngineTable) -> None:
        self._on_card = engine.device == "cuda"

    @property
    def uses_gpu(self) -> bool:
        """Where it was told to."""
        return self._on_card

    @property
    def version(self) -> str:
        """It comes with us."""
        try:
            return importlib.metadata.version("llm-appliance")
        except importlib.metadata.PackageNotFoundError:
            return ""

    def first_rung(self, config: Config) -> Rung:
        """Memory is the KV pool of the configuration, which the engine checks at its start."""
        return configured_rung(config, _configured_context(config), _kv_dtype(config.engine))

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """Its options."""
        return _words(config, rung)

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """Raises ModelError, and ConfigError where there is no engine or not the memory for what is configured."""
        model = _checked_model(config)
        _check_device(config.engine)
        on_card = config.engine.device == "cuda"
        if not on_card:
            _check_pool(config.engine.kv_pool_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        engine = config.engine
        python = launch_python(engine.python)
        if python is None:
            raise ConfigError("the built-in engine is not set up on this machine", hint="make its environment: appliancectl setup")
        threads = engine.threads or len(os.sched_getaffinity(0))
        endpoint = unix_socket(run_dir, generation)
        asks = ("--weight-holder", str(run_dir / WEIGHTS_SOCKET)) if engine.weight_holder else ()
        argv = (
            python, "-m", "appliance.engine",
            "--model", str(model),
            "--name", served_name(config),
            "--socket", str(endpoint.socket_path),
            "--threads", str(threads),
            *_words(config, rung),
            "--kv-pool-bytes", str(engine.kv_pool_bytes),
            "--swap-bytes", str(engine.swap_bytes),
            "--prefill-fraction", str(engine.prefill_fraction),
            "--weights-dtype", engine.weights_dtype,
            "--device", engine.device,
            "--max-body-bytes", str(config.gateway.max_body_bytes),
            *asks,
            *engine.extra_args,
        )  # fmt: skip
        environment = engine_environment() | {"OMP_NUM_THREADS": str(threads)}
        # Of the settings it knows those that a rung never changes; it is told the others when it takes over.
        loads = ("--model", str(model), "--threads", str(threads), "--weights-dtype", engine.weights_dtype)
        waiting = (python, "-m", "appliance.engine", "--spare", *loads, *asks)
        holding = (python, "-m", "appliance.engine.weight_holder", *loads)
        spare, holder = (SpareSpec(words, environment, str(run_dir), _stamp(model)) for words in (waiting, holding))
        return launched(
            config, rung, run_dir, endpoint, argv, environment,
            runtime=runtime_of(python), spare=spare if engine.warm_spare and not on_card else None,
            holder=holder if engine.weight_holder else None,
        )  # fmt: skip

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:  # noqa: ARG002 - the protocol's
        """Two greedy tokens."""
        return (PROOF,)

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """The whole context but for one token of answer, or all of the prompts' part of the KV cache."""
        tokens = min(limits.context_length_tokens - 1, limits.max_prompt_tokens or limits.context_length_tokens)

        def request(ids: list[int]) -> ProofRequest:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
            return ProofRequest(PROOF.path, body, PROOF.accepts)

        return longest(tokens, request, config.engine.kv_pool_bytes)

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """The engine always says."""
        return assumed_limits(config, rung)


def _words(config: Config, rung: Rung) -> tuple[str, ...]:
    """Where the rung leaves the context as configured, 0 stays 0: the engine cuts the model's limit to its KV cache."""
    untouched = rung.context_length_tokens == _configured_context(config)
    context = config.engine.context_length_tokens if untouched else rung.context_length_tokens
    said = replace(rung, context_length_tokens=context, block_tokens=config.engine.block_tokens, plan=None)
    return words_of(config, said, version_in_use(config, "")).arguments


def _checked_model(config: Config) -> Path:
    if not config.model.path:
        raise ModelError("model.path is not set", hint="name the model's folder in appliance.toml, or bring one: appliancectl setup --demo")
    folder = Path(config.model.path)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ModelError(f"model.path = {config.model.path!r} {what}", hint="correct it, or bring a model: appliancectl setup --demo")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        raise ModelError(
            f"the model folder {folder} lacks {' and '.join(missing)}", hint="its conversion or download is not complete: do it again"
        )
    return folder.resolve()


def _kv_dtype(engine: EngineTable) -> str:
    """On a card that of the weights; the CPU computes in float32."""
    if engine.device == "cpu":
        return "float32"
    return "bfloat16" if engine.weights_dtype == "int8" else engine.weights_dtype


def _check_device(engine: EngineTable) -> None:
    """What the other device cannot do is not started."""
    if engine.device == "cpu" and engine.weights_dtype not in ("int8", "float32"):
        what = f'engine.weights_dtype = "{engine.weights_dtype}" is for a card, and engine.device is "cpu"'
        raise ConfigError(what, hint='set engine.weights_dtype to "int8" or "float32", or engine.device to "cuda"')
    if engine.device == "cuda" and engine.weight_holder:
        what = 'engine.weight_holder keeps weights in the host\'s memory, and engine.device is "cuda"'
        raise ConfigError(what, hint="set engine.weight_holder to false")


def _check_pool(pool_bytes: int, memory_bytes: int) -> None:
    """What no start can get is not tried: it would fill a machine's memory before it fails."""
    if pool_bytes >= memory_bytes:
        pool, memory = format_bytes(pool_bytes), format_bytes(memory_bytes)
        what = f"engine.kv_pool_bytes = {pool} is more than the {memory} of memory that this machine has"
        raise ConfigError(what, hint=f"lower engine.kv_pool_bytes in appliance.toml, well below {memory}")


def _stamp(folder: Path) -> str:
    """Changes whenever a file is replaced or written."""
    facts = []
    for file in sorted(folder.iterdir()):
        if file.suffix in _MODEL_SUFFIXES:
            status = file.stat()
            facts.append(f"{file.name} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _configured_context(config: Config) -> int:
    """What rung 0 serves, as far as we know: the configured number, else the model's own limit, else 0."""
    if config.engine.context_length_tokens:
        return config.engine.context_length_tokens
    try:
        document: Any = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
        context = document["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # not our place to complain: launch_spec names what is missing
    return context if isinstance(context, int) and not isinstance(context, bool) else 0
