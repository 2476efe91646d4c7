"""Somebody else's engine, started by `engine.command`. It has to answer GET /health and one of the OpenAI completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.backends.environment import engine_environment
from appliance.backends.loopback import free_port
from appliance.backends.native import PROOF, served_name
from appliance.backends.protocol import OWN_VOICE, ProofRequest, WorstPrompt, configured_rung, plain_ids
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
        endpoint = Endpoint(port=free_port()) if uses_port else Endpoint(socket_path=str(run_dir / f"engine-{generation}.sock"))
        values = {
            "{socket}": endpoint.socket_path or "",
            "{port}": str(endpoint.port),
            "{model}": config.model.path,
            **{word: str(value(rung)) for word, value in RUNG_WORDS.items()},
        }
        return LaunchSpec(
            argv=tuple(_filled(word, values) for word in (*config.engine.command, *config.engine.extra_args)),
            env=engine_environment(),
            cwd=str(run_dir),
            endpoint=endpoint,
            probe_path="/health",
            start_deadline_s=config.supervisor.start_deadline_s,
            stop_deadline_s=config.supervisor.stop_deadline_s,
            engine=self.name,
            rung=rung,
        )

    def proof(self, config: Config) -> tuple[ProofRequest, ...]:
        """One token, by whichever completion the engine has."""
        name = {"model": config.model.name} if config.model.name else {}
        message = {"role": "user", "content": "Hi"}
        return (
            ProofRequest("/v1/completions", {**name, "prompt": "The", "max_tokens": 1, "temperature": 0}, _has_choices),
            ProofRequest("/v1/chat/completions", {**name, "messages": [message], "max_tokens": 1, "temperature": 0}, _has_choices),
            PROOF,
        )

    def worst_prompt(self, config: Config, limits: EngineLimits) -> WorstPrompt | None:
        """SGLang, vLLM and llama.cpp take a prompt as token ids; an engine that does not cannot be proved."""
        tokens = limits.context_length_tokens - 8  # SGLang keeps six of them for itself
        if tokens < 1:
            return None
        name = {"model": config.model.name} if config.model.name else {}
        body = {**name, "prompt": plain_ids(tokens), "max_tokens": 1, "temperature": 0}
        return WorstPrompt(ProofRequest("/v1/completions", body, _has_choices), tokens)

    def limits(self, config: Config, rung: Rung) -> EngineLimits:
        """As configured."""
        return EngineLimits(served_name(config), rung.context_length_tokens, rung.max_running, 0)


def _filled(word: str, values: Mapping[str, str]) -> str:
    # Not str.format: a command may well contain braces of its own, such as JSON.
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _has_choices(answer: Mapping[str, Any]) -> bool:
    return bool(answer.get("choices"))
