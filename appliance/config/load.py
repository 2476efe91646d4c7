"""TOML files → Config. Every refusal names the file, the key's path, the value, and what is legal."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.config.keys import KeyFacts, facts_of, keys_of
from appliance.config.schema import Config, tables
from appliance.core.errors import ConfigError
from appliance.core.units import format_bytes, parse_bytes, parse_duration_s

DEFAULT_PATH = Path("/etc/llm-appliance/appliance.toml")
BUILT_IN = "built-in default"


@dataclass(frozen=True, slots=True)
class Shadowed:
    """A value that a later file has replaced by another: `file` says it in vain, `by` is in force (where nothing later is)."""

    name: str
    value: Any
    file: str
    by: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A Config and where each value came from: "table.key" → file path, "command line" or "built-in default"."""

    config: Config
    origins: Mapping[str, str]
    shadowed: Sequence[Shadowed] = ()


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Read `path`, then its `conf.d/*.toml` in name order, then `overrides` ("table.key" → value).

    A later file wins key by key. With `path` None only the built-in defaults and the overrides count.

    Raises:
        ConfigError: unreadable file, TOML syntax, unknown table or key, wrong type, value out of its limits,
            or two keys that contradict each other. All errors of all files are in one message, a line each.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    errors: list[str] = []
    shadowed: list[Shadowed] = []
    for file in _files(path, errors):
        for name, value in _read(file, errors).items():
            if name in values and values[name] != value:
                shadowed.append(Shadowed(name, values[name], origins[name], str(file)))
            values[name] = value
            origins[name] = str(file)
    for name, value in (overrides or {}).items():
        checked = _check_named(name, value, "command line", errors)
        if checked is not None:
            values[name] = checked
            origins[name] = "command line"
    config = _build(values)
    errors.extend(_contradictions(config))
    if errors:
        raise ConfigError("\n".join(errors))
    return LoadedConfig(config, {name: origins.get(name, BUILT_IN) for name in _all_names()}, tuple(shadowed))


def _files(path: Path | None, errors: list[str]) -> Sequence[Path]:
    if path is None:
        return ()
    folder = path.parent / "conf.d"
    try:
        drop_ins = sorted(file for file in folder.iterdir() if file.suffix == ".toml")
    except FileNotFoundError:
        drop_ins = []
    except OSError as error:  # not Path.glob: it would pass over an unreadable folder in silence
        errors.append(f"{folder}: cannot be listed ({error.strerror}); it holds the drop-ins of {path.name}")
        drop_ins = []
    return (path, *drop_ins)


def _read(file: Path, errors: list[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        errors.append(f"{file}: cannot be read ({error.strerror}); give another file with --config")
        return {}
    except UnicodeDecodeError as error:
        errors.append(f"{file}: is not UTF-8 (byte {error.start})")
        return {}
    except (ValueError, RecursionError) as error:  # more than TOMLDecodeError: numbers of 5000 digits, arrays 1000 deep
        errors.append(f"{file}: is not TOML: {error}")
        return {}
    values: dict[str, Any] = {}
    known = tables()
    for table, content in document.items():
        if table not in known:
            errors.append(f"{file}: unknown table [{table}]{_nearest(table, known)}")
        elif not isinstance(content, dict):
            errors.append(f"{file}: {table} is a table: write [{table}] and its keys below it")
        else:
            for name, value in content.items():
                checked = _check_named(f"{table}.{name}", value, str(file), errors)
                if checked is not None:
                    values[f"{table}.{name}"] = checked
    return values


def _check_named(name: str, value: Any, origin: str, errors: list[str]) -> Any | None:
    table, _, key_name = name.partition(".")
    keys = keys_of(tables()[table]) if table in tables() else {}
    if key_name not in keys:
        errors.append(f"{origin}: unknown key {name}{_nearest_key(name)}")
        return None
    try:
        return convert(value, keys[key_name], facts_of(keys[key_name]))
    except ValueError as error:
        errors.append(f"{origin}: {name} = {value!r}: {error}")
        return None


def convert(value: Any, key_field: dataclasses.Field[Any], facts: KeyFacts) -> Any:
    """The value as the key holds it.

    Raises:
        ValueError: of the wrong type, or outside of the key's limits.
    """
    expected = type(key_field.default)
    if isinstance(value, str) and facts.unit == "bytes":
        value = parse_bytes(value)
    elif isinstance(value, str) and facts.unit == "s":
        value = parse_duration_s(value)
    if expected is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if expected is tuple and isinstance(value, list):
        value = tuple(value)
        if not all(type(item) is facts.items for item in value):
            raise ValueError(f"expected {_type_words(tuple, facts)}")
    if type(value) is not expected:
        raise ValueError(f"expected {_type_words(expected, facts)}, found {_type_words(type(value), KeyFacts(''))}")
    items: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for item in items:
        _check_limits(item, facts)
    return value


def _check_limits(value: Any, facts: KeyFacts) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if facts.choices and value not in facts.choices:
        near = difflib.get_close_matches(value, facts.choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"is none of {', '.join(map(repr, facts.choices))}{hint}")
    if facts.minimum is not None and not value >= facts.minimum:
        raise ValueError(f"is below the minimum of {_limit_words(facts.minimum, facts)}")
    if facts.maximum is not None and not value <= facts.maximum:
        raise ValueError(f"is above the maximum of {_limit_words(facts.maximum, facts)}")


def _limit_words(limit: float, facts: KeyFacts) -> str:
    if facts.unit == "bytes":
        return format_bytes(int(limit))
    return f"{limit:.10g}{facts.unit and ' ' + facts.unit}"


def _type_words(kind: type, facts: KeyFacts) -> str:
    if facts.unit == "bytes":
        return 'a size such as 536870912 or "512MiB"'
    if facts.unit == "s":
        return 'a duration such as 30 or "30s"'
    words = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        tuple: "a list of whole numbers" if facts.items is int else "a list of strings",
    }
    return words.get(kind, f"a {kind.__name__}")


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _nearest_key(name: str) -> str:
    """The same key of another table, or one that is spelt alike."""
    elsewhere = [known for known in _all_names() if known.partition(".")[2] == name.partition(".")[2]]
    return f"; did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else _nearest(name, _all_names())


def _all_names() -> Sequence[str]:
    return [f"{table}.{name}" for table, kind in tables().items() for name in keys_of(kind)]


def _build(values: Mapping[str, Any]) -> Config:
    built = {}
    for table, kind in tables().items():
        built[table] = kind(**{name: values[f"{table}.{name}"] for name in keys_of(kind) if f"{table}.{name}" in values})
    return Config(**built)


def _contradictions(config: Config) -> Sequence[str]:
    supervisor = config.supervisor
    found = []
    if supervisor.hang_floor_s > supervisor.hang_ceiling_s:
        found.append(
            f"supervisor.hang_floor_s = {supervisor.hang_floor_s:g} is above supervisor.hang_ceiling_s = "
            f"{supervisor.hang_ceiling_s:g}; lower the floor or raise the ceiling"
        )
    if supervisor.backoff_first_s > supervisor.backoff_max_s:
        found.append(
            f"supervisor.backoff_first_s = {supervisor.backoff_first_s:g} is above supervisor.backoff_max_s = "
            f"{supervisor.backoff_max_s:g}; lower the first wait or raise the longest"
        )
    if config.fallback.base_url and not config.fallback.base_url.startswith(("http://", "https://")):
        found.append(
            f"fallback.base_url = {config.fallback.base_url!r} is no http or https URL; write for example https://api.example.com/v1"
        )
    for name in ("model", "api_key_file"):
        if getattr(config.fallback, name) and not config.fallback.base_url:
            found.append(f"fallback.{name} is set and fallback.base_url is not; set the address of the other endpoint, or remove it")
    if config.gateway.admin_actions and not config.gateway.api_keys_file:
        found.append(
            "gateway.admin_actions = true needs gateway.api_keys_file: without keys anybody could stop the engine; set both, or neither"
        )
    if bool(config.gateway.tls_certificate) != bool(config.gateway.tls_key):
        found.append("gateway.tls_certificate and gateway.tls_key belong together; set both, or neither")
    if both := sorted(set(config.admission.length_buckets).intersection(config.admission.fused_lengths)):
        found.append(f"admission.length_buckets and admission.fused_lengths both have {both[0]}; no prompt can be moved to a fused length")
    if config.engine.backend == "custom" and not config.engine.command:
        found.append('engine.backend = "custom" needs engine.command; write the argument list that starts your engine')
    elif config.engine.backend == "custom" and not any(word in part for part in config.engine.command for word in ("{socket}", "{port}")):
        found.append("engine.command has neither {socket} nor {port}; put one where your engine takes its address, so that we know it")
    if config.gpu.layout in ("single", "replicas") and config.engine.tensor_parallel > 1:
        found.append(
            f'gpu.layout = "{config.gpu.layout}" and engine.tensor_parallel = {config.engine.tensor_parallel} contradict each other: with '
            f'the first an engine has one card; remove one of them, or set gpu.layout = "tp"'
        )
    if 0 < config.engine.prefill_chunk_tokens < 16:
        found.append(f"engine.prefill_chunk_tokens = {config.engine.prefill_chunk_tokens} is below the minimum of 16; 0 lets us choose")
    for variable in config.engine.environment:
        if not variable.partition("=")[0].isidentifier() or "=" not in variable:
            found.append(f'engine.environment: {variable!r} is no variable; write "NAME=VALUE"')
    if config.engine.backend != "custom" and config.engine.command:
        found.append(f'engine.command is set and engine.backend is "{config.engine.backend}"; set engine.backend = "custom" or remove it')
    return found
