"""Somebody else's engine, started by `engine.command`. It has to answer GET /health and one of the OpenAI completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.backends.environment import engine_environment
from appliance.backends.launching import assumed_limits, launched, unix_socket
from appliance.backends.loopback import free_port
from appliance.backends.native import PROOF
from appliance.backends.prompts import has_choices, longest
from appliance.backends.protocol import OWN_VOICE, ProofRequest, WorstPrompt, configured_rung
from appliance.config.schema import Config
from appliance.core.launch import Endpoint, EngineLimits, LaunchSpec
from appliance.core.plan import Rung

RUNG_WORDS: dict[str, Callable[[Rung], int]] = {
    "{context_length}": lambda rung: rung.context_length_tokens,
    "{prefill_chunk}": lambda rung: rung.prefill_chunk_tokens,
    "{max_running}": lambda rung: rung.max_running,
}


class CustomBackend:
    """See Backend."""

    name = "custom"
    version = ""
    uses_gpu = True
    voice = OWN_VOICE

    def first_rung(self, config: Config) -> Rung:
        """As configured."""
        return configured_rung(config, config.engine.context_length_tokens, "auto")

    def told(self, config: Config, rung: Rung) -> tuple[object, ...]:
        """What its command takes."""
        command = " ".join((*config.engine.command, *config.engine.extra_args))
        return tuple(value(rung) for word, value in RUNG_WORDS.items() if word in command)

    def launch_spec(self, config: Config, rung: Rung, generation: int, run_dir: Path) -> LaunchSpec:
        """The command with its {words} filled in."""
        uses_port = any("{port}" in word for word in config.engine.command)
        endpoint = Endpoint(port=free_port()) if uses_port else unix_socket(run_dir, generation)
        values = {
            "{socket}": endpoint.socket_path or "",
            "{port}": str(endpoint.port),
            "{model}": config.model.path,
            **{word: str(value(rung)) for word, value in RUNG_WORDS.items()},
        }
        argv = tuple(_filled(word, values) for word in (*config.engine.command, *config.engine.extra_args))
        return launched(config, rung, run_dir, endpoint, argv, engine_environment())

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """One token, by whichever completion the engine has."""
        name = {"model": config.model.name} if config.model.name else {}
        message = {"role": "user", "content": "Hi"}
        return (
            ProofRequest("/v1/completions", {**name, "prompt": "The", "max_tokens": 1, "temperature": 0}, has_choices),
            ProofRequest("/v1/chat/completions", {**name, "messages": [message], "max_tokens": 1, "temperature": 0}, has_choices),
            PROOF,
        )

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """SGLang, vLLM and llama.cpp take a prompt as token ids; an engine that does not cannot be proved."""
        name = {"model": config.model.name} if config.model.name else {}

        def request(ids: list[int]) -> ProofRequest:
            return ProofRequest("/v1/completions", {**name, "prompt": ids, "max_tokens": 1, "temperature": 0}, has_choices)

        return longest(limits.context_length_tokens - 8, request)  # SGLang keeps six of them for itself

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """As configured."""
        return assumed_limits(config, rung)


def _filled(word: str, values: Mapping[str, str]) -> str:
    # Not str.format: a command may well contain braces of its own, such as JSON.
    for name, value in values.items():
        word = word.replace(name, value)
    return word
