"""vLLM: `python -m vllm.entrypoints.cli.main serve` of its own environment, on a unix socket. Read in 0.10.2, 0.12.0 and 0.32.0."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from appliance.backends import installed
from appliance.backends.full_rung import LinearState, configured_in_full
from appliance.backends.launching import assumed_limits, launched, served_name, unix_socket
from appliance.backends.model_folder import checked_folder
from appliance.backends.prompts import completion, longest
from appliance.backends.protocol import Counters, ProofRequest, Voice, WorstPrompt, count_in, json_object
from appliance.backends.wording import OFFLINE, environment_of, judged_extra_args, told, version_in_use, words_of
from appliance.config.runtimes import installed_version, runtime_of
from appliance.config.schema import Config, EngineTable
from appliance.core.launch import ContinuesBy, EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.versions import Version

DISTRIBUTION = "vllm"
CHUNK_TOKENS = 2048
FINDS_LENGTH = (0, 14)
"""--max-model-len auto."""

_ENVIRONMENT = OFFLINE | {
    "VLLM_NO_USAGE_STATS": "1",
    # Its kernels' caches are keyed by their own contents; a half-written one is not left where the next start reads it.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
_SAMPLE = r"^vllm:{}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$"
_FIGURES = {
    name: re.compile(_SAMPLE.format(name).encode(), re.MULTILINE)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens")
}
_BLOCKS = re.compile(rb"^vllm:cache_config_info\{[^}]*\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
USAGE_STEPS = 10**6
_CPU_POOL = "VLLM_CPU_KVCACHE_SPACE"
_POOL_NOTE = (
    f"{_CPU_POOL} in engine.environment fixes the KV cache on a CPU: no rung can ask for less; leave it out and set budget.mem_fraction"
)


class VllmBackend:
    """See Backend."""

    name = "vllm"
    uses_gpu = True

    def __init__(self, engine: EngineTable) -> None:
        self._engine = engine

    @property
    def version(self) -> str:
        """Of the environment in force now: the link may have moved since the last start."""
        return self._engine.version or installed_version(self._engine.python, DISTRIBUTION)

    @property
    def voice(self) -> Voice:
        """/metrics is answered by the front alone, from counters that each step of the engine sends it."""
        return Voice("/metrics", counters_of, (("/v1/models", length_of), ("/metrics", limits_of)))

    def first_rung(self, config: Config) -> Rung:
        """As configured, said in full."""
        rung = configured_in_full(config, CHUNK_TOKENS, LinearState())
        if config.engine.context_length_tokens or _version(config) < FINDS_LENGTH:
            return rung
        return replace(rung, context_length_tokens=0)  # as much as fits: it refuses to start with more

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """Its options and variables."""
        return told(config, rung, _version(config))

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """Raises ModelError and ConfigError."""
        python = installed.engine_python(config, DISTRIBUTION)
        model, version = checked_folder(config), _version(config)
        fixed = any(variable.startswith(f"{_CPU_POOL}=") for variable in config.engine.environment)
        notes = (*judged_extra_args(config, version), *((_POOL_NOTE,) if fixed else ()))
        words = words_of(config, rung, version)
        endpoint = unix_socket(run_dir, generation)
        argv = (
            python, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
            "--served-model-name", served_name(config),
            "--uds", str(endpoint.socket_path),
            "--disable-uvicorn-access-log",
            *words.arguments,
            *config.engine.extra_args,
        )  # fmt: skip
        env = environment_of(config, words, _ENVIRONMENT, installed.environment_bin(python))
        return launched(config, rung, run_dir, endpoint, argv, env, notes=notes, runtime=runtime_of(python))

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """One greedy token."""
        return (completion(config, "The"),)

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """The whole context but for one token of answer."""
        return longest(limits.context_length_tokens - 1, lambda ids: completion(config, ids))

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """Of the rung; the engine says how many tokens its cache has."""
        return assumed_limits(config, rung, ContinuesBy.MESSAGE)


def counters_of(body: bytes) -> Counters:
    """Of /metrics. A long prompt counts as tokens only when it is done; until then each of its steps takes more of the KV cache."""
    figures = {name: sum(map(_number, pattern.findall(body))) for name, pattern in _FIGURES.items()}
    progress = int(figures["prompt_tokens"] + figures["generation_tokens"] + USAGE_STEPS * figures["kv_cache_usage_perc"])
    running = int(figures["num_requests_running"])
    return Counters(
        progress, running, int(figures["num_requests_waiting"]), counts_requests=_FIGURES["num_requests_running"].search(body) is not None
    )


def length_of(body: bytes, assumed: EngineLimits) -> EngineLimits:
    """Of /v1/models: --max-model-len, which it may have found itself."""
    models = json_object(body).get("data")
    length = count_in(models[0], "max_model_len") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    return replace(assumed, context_length_tokens=length or assumed.context_length_tokens)


def limits_of(body: bytes, assumed: EngineLimits) -> EngineLimits:
    """The size of its cache is a label of /metrics."""
    found = _BLOCKS.search(body)
    labels = dict(_LABEL.findall(found[0])) if found is not None else {}
    tokens = int(_number(labels.get(b"num_gpu_blocks", b"0")) * _number(labels.get(b"block_size", b"0")))
    return replace(assumed, context_length_tokens=assumed.context_length_tokens or tokens, kv_tokens=tokens)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _version(config: Config) -> Version:
    return version_in_use(config, installed_version(config.engine.python, DISTRIBUTION))
