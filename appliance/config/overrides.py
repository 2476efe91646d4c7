"""`--set table.key=value` of applianced, the gateway and appliancectl → overrides for `load_config`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from appliance.config.keys import facts_of, keys_of
from appliance.config.schema import tables
from appliance.core.errors import ConfigError


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """ "table.key" → value, of texts such as `gateway.port=8080`, `model.path=/srv/model` or `engine.extra_args=["-v"]`.

    Strings, sizes and durations are taken as they stand, without quotes; everything else is TOML. Whether the key
    exists and the value is legal is `load_config`'s to say.

    Raises:
        ConfigError: an assignment without "=", or a value that is no TOML where TOML is needed.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--set {assignment!r}: no table.key=value", hint="write for example --set gateway.port=8080")
        overrides[name] = _value(name, text)
    return overrides


def _value(name: str, text: str) -> Any:
    if _is_textual(name):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--set {name}={text}: {text!r} is no number, true, false or list",
            hint='write for example engine.threads=2, metrics.enabled=false or engine.extra_args=["-v"]',
        ) from None


def _is_textual(name: str) -> bool:
    table, _, key_name = name.partition(".")
    key_field = keys_of(tables()[table]).get(key_name) if table in tables() else None
    if key_field is None:
        return True
    return isinstance(key_field.default, str) or facts_of(key_field).unit in ("bytes", "s")
