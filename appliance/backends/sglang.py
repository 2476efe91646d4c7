"""SGLang: `python -m sglang.launch_server` of its own environment, on a loopback port. Read in 0.5.9, 0.5.17 and 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.backends import installed
from appliance.backends.full_rung import LinearState, configured_in_full
from appliance.backends.launching import assumed_limits, launched, served_name
from appliance.backends.loopback import free_port
from appliance.backends.model_folder import checked_folder
from appliance.backends.prompts import longest
from appliance.backends.protocol import Counters, ProofRequest, Voice, WorstPrompt, count_in, json_object
from appliance.backends.wording import OFFLINE, environment_of, judged_extra_args, told, version_in_use, words_of
from appliance.config.runtimes import installed_version, runtime_of
from appliance.config.schema import Config, EngineTable
from appliance.core.launch import ContinuesBy, Endpoint, EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.versions import Version
from appliance.flags import sglang as options

DISTRIBUTION = "sglang"
CHUNK_TOKENS = 2048
KEPT_TOKENS = 6
"""Of the context, a prompt may have all but these (managers/tp_worker.py: max_req_input_len)."""
SLOTS_PER_REQUEST = 3

_ENVIRONMENT = OFFLINE | {
    # /health sends a token through the model and waits a second for it; timed-out ones pile up and have crashed it (sglang#35884).
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # After a crash these keep the port open and silent for 65 s; our own evidence needs neither.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    # An accounting difference while idle ends a server that works (sglang#20010); it is still a line in the log.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    # How often it looks whether a client is still there: the gateway closes the connection of one that is not.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "10",
    # Fragments were the difference between 1.09 GiB that sufficed and 0.65 GiB that did not.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
_QUIET_PATHS = ("/health", "/v1/loads", "/metrics", "/server_info")
"""Ours: a line of its log for each would bury the others."""


class SglangBackend:
    """See Backend."""

    name = "sglang"
    uses_gpu = True

    def __init__(self, engine: EngineTable) -> None:
        self._engine = engine

    @property
    def version(self) -> str:
        """Of the environment in force now: the link may have moved since the last start."""
        return self._engine.version or installed_version(self._engine.python, DISTRIBUTION)

    @property
    def voice(self) -> Voice:
        """/v1/loads is a snapshot of shared memory: it asks nothing of the scheduler, and its age tells whether that still turns."""
        return Voice("/v1/loads?include=core", counters_of, (("/server_info", limits_of),))

    def first_rung(self, config: Config) -> Rung:
        """As configured, said in full."""
        return configured_in_full(config, CHUNK_TOKENS, LinearState(SLOTS_PER_REQUEST, "bfloat16"))

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """Its options and variables."""
        return told(config, rung, _version(config))

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:  # noqa: ARG002 - a new port each time
        """Raises ModelError and ConfigError."""
        python = installed.engine_python(config, DISTRIBUTION)
        model, version = checked_folder(config), _version(config)
        notes = judged_extra_args(config, version)
        words, endpoint = words_of(config, rung, version), Endpoint(port=free_port())
        argv = (
            python, "-m", "sglang.launch_server",
            "--model-path", str(model),
            "--served-model-name", served_name(config),
            "--host", "127.0.0.1",
            "--port", str(endpoint.port),
            "--uvicorn-access-log-exclude-prefixes", *_QUIET_PATHS,
            "--enable-metrics",
            "--sleep-on-idle",
            "--log-level", "info",
            "--watchdog-timeout", "300",
            "--max-queued-requests", "1024",
            *(("--load-snapshot-publish-interval", "5") if options.has_snapshots(version) else ()),
            *words.arguments,
            *config.engine.extra_args,
        )  # fmt: skip
        env = environment_of(config, words, _ENVIRONMENT, installed.environment_bin(python))
        return launched(config, rung, run_dir, endpoint, argv, env, notes=notes, runtime=runtime_of(python))

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:  # noqa: ARG002 - the protocol's
        """Two greedy tokens."""
        return (_generation({"text": "The"}, 2),)

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:  # noqa: ARG002 - the protocol's
        """As many ids as it said it takes."""
        tokens = limits.max_prompt_tokens or limits.context_length_tokens - KEPT_TOKENS
        return longest(tokens, lambda ids: _generation({"input_ids": ids}, 1))

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """Of the rung; the engine says more."""
        return assumed_limits(config, rung, ContinuesBy.MESSAGE)


def counters_of(body: bytes) -> Counters:
    """Of /v1/loads: one snapshot a scheduler.

    While requests run, progress is the age of the newest snapshot, which is written after each prefill chunk and every few decode steps;
    while none do, one is written in every idle turn, and what was computed is told by the tokens instead.
    """
    loads = [load for load in json_object(body).get("loads") or () if isinstance(load, dict)]
    if not loads:
        return Counters()
    running = sum(count_in(load, "num_running_reqs") or 0 for load in loads)
    waiting = sum(count_in(load, "num_waiting_reqs") or 0 for load in loads)
    used = sum(count_in(load, "num_used_tokens") or 0 for load in loads)
    computed = sum(count_in(load, "total_prefill_uncached_tokens") or 0 for load in loads)
    stamps = [load["timestamp"] for load in loads if isinstance(load.get("timestamp"), float)]
    progress = round(1000 * max(stamps)) if running and stamps else used + computed
    return Counters(progress, running, waiting, kv_blocks_used=used, counts_requests=True)


def limits_of(body: bytes, assumed: EngineLimits) -> EngineLimits:
    """Of /server_info: a request may be as long as the context and as the KV cache."""
    said = json_object(body)
    states = said.get("internal_states")
    state: Mapping[str, Any] = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    tokens = count_in(said, "max_total_num_tokens") or 0
    context = count_in(said, "context_length") or assumed.context_length_tokens or tokens
    return EngineLimits(
        model_id=str(said.get("served_model_name") or assumed.model_id),
        context_length_tokens=min(context, tokens) if tokens else context,
        max_running=count_in(state, "effective_max_running_requests_per_dp") or assumed.max_running,
        kv_tokens=tokens,
        max_prompt_tokens=count_in(said, "max_req_input_len") or 0,
        continues_by=assumed.continues_by,
    )


def _generation(prompt: Mapping[str, Any], tokens: int) -> ProofRequest:
    body = {**prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0}}
    return ProofRequest("/generate", body, _has_tokens)


def _has_tokens(answer: Mapping[str, Any]) -> bool:
    about = answer.get("meta_info")
    return isinstance(answer.get("text"), str) and isinstance(about, dict) and bool(count_in(about, "completion_tokens"))


def _version(config: Config) -> Version:
    return version_in_use(config, installed_version(config.engine.python, DISTRIBUTION))
