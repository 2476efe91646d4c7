"""A rung in an engine's words, with the owner's extra arguments judged: what the engines that others wrote have in common."""

from __future__ import annotations

from collections.abc import Mapping

from appliance import flags
from appliance.backends.environment import engine_environment
from appliance.config.schema import Config
from appliance.core.errors import ConfigError
from appliance.core.plan import Rung
from appliance.core.versions import Version, version_of
from appliance.flags import EngineWords

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
"""The model lies on this box: an engine that asks a hub about it at each start does not start without a network."""


def version_in_use(config: Config, installed: str) -> Version:
    """What the owner says, else what is installed, else the newest that we know."""
    return version_of(config.engine.version or installed, flags.rules_of(config.engine.backend).newest)


def words_of(config: Config, rung: Rung, version: Version) -> EngineWords:
    """The rung in the words of the configured engine."""
    return flags.rules_of(config.engine.backend).words(rung, version)


def told(config: Config, rung: Rung, version: Version) -> tuple[object, ...]:
    """What of a rung reaches such an engine: its options and variables."""
    words = words_of(config, rung, version)
    return (words.arguments, tuple(words.environment.items()))


def judged_extra_args(config: Config, version: Version) -> tuple[str, ...]:
    """The dangers among engine.extra_args, a sentence each.

    Raises:
        ConfigError: one of them cannot stand there.
    """
    remarks = flags.rules_of(config.engine.backend).remarks(config.engine.extra_args, version)
    refused = [remark.sentence for remark in remarks if remark.is_refusal]
    if refused:
        raise ConfigError("; ".join(refused))
    return tuple(remark.sentence for remark in remarks)


def environment_of(config: Config, words: EngineWords, ours: Mapping[str, str], programs: str = "") -> dict[str, str]:
    """Complete, and nothing in it that was not chosen: ours, the rung's, the owner's last. `programs`: a folder in front of PATH."""
    base = engine_environment()
    if programs:
        base["PATH"] = f"{programs}:{base['PATH']}"
    owners = dict(variable.split("=", 1) for variable in config.engine.environment)
    return {**base, **ours, **words.environment, **owners}
