"""Core dataclasses <-> JSON, driven by their type annotations, so that a new field of core needs no line here.

Enums travel as their value (causes as their label), endpoints as `str(endpoint)`, tuples and frozensets as lists, nested
dataclasses as objects. Reading ignores keys it does not know and takes a field's default where one is absent: gateway
and applianced may be of different versions during an upgrade.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.errors import ControlError
from appliance.core.evidence import Evidence
from appliance.core.incident import Incident
from appliance.core.launch import Endpoint, EngineLimits
from appliance.core.plan import Rung
from appliance.core.publication import Publication
from appliance.core.requests import InflightRequest

T = TypeVar("T")


class CodecError(ControlError):
    """A JSON value is not what its core type needs; the message names the path, the value and what was expected."""


def to_json(value: object) -> Any:
    """JSON-ready form of a core dataclass, or of anything inside one."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)  # JSON has no NaN and no infinity
        case None | bool() | int() | float() | str():
            return value
        case Cause():
            return value.label
        case enum.Enum():
            return value.value
        case Endpoint():
            return str(value)
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case frozenset() | set():
            return sorted(to_json(item) for item in value)
    if dataclasses.is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in _hints(cast(type, type(value)))}
    return str(value)


def from_json(kind: type[T], data: Any, path: str = "") -> T:
    """The inverse of to_json for a type whose annotations say what is inside.

    Raises:
        CodecError: a value of the wrong kind, or a required field that is missing.
    """
    return cast(T, _read(kind, data, path or kind.__name__))


def _read(kind: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_optional(kind, data, path)
    if origin in (tuple, frozenset):
        return _read_sequence(kind, origin, data, path)
    if origin is not None and issubclass(origin, Mapping):
        return dict(_expect(dict, data, path))
    if kind is Endpoint or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return _read_word(kind, data, path)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(cast(type, kind), data, path)
    if kind is float:
        return float(_expect((int, float), data, path))
    return data if kind in (object, Any) else _expect(kind, data, path)


def _read_optional(kind: Any, data: Any, path: str) -> Any:
    choices = typing.get_args(kind)
    if data is None and type(None) in choices:
        return None
    (only,) = (choice for choice in choices if choice is not type(None))
    return _read(only, data, path)


def _read_sequence(kind: Any, origin: Any, data: Any, path: str) -> Any:
    items = _expect(list, data, path)
    arguments = typing.get_args(kind)
    if origin is frozenset or arguments[1:] == (...,):
        return origin(_read(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if len(items) != len(arguments):
        raise CodecError(f"{path}: {len(items)} items, expected {len(arguments)}")
    return tuple(_read(argument, item, f"{path}[{i}]") for i, (argument, item) in enumerate(zip(arguments, items, strict=True)))


def _read_word(kind: Any, data: Any, path: str) -> Any:
    word = _expect((str, int), data, path)
    try:
        if kind is Endpoint:
            return Endpoint.parse(str(word))
        return Cause.of(str(word)) if kind is Cause else kind(word)
    except (ValueError, KeyError):
        raise CodecError(f"{path}: {word!r} is no {kind.__name__}") from None


def _read_dataclass(kind: type, data: Any, path: str) -> Any:
    given = _expect(dict, data, path)
    hints = _hints(kind)
    try:
        return kind(**{name: _read(hint, given[name], f"{path}.{name}") for name, hint in hints.items() if name in given})
    except TypeError as error:
        raise CodecError(f"{path}: {error}", hint="applianced and this program may be of different versions") from error


def _expect(kind: Any, data: Any, path: str) -> Any:
    wrong_bool = isinstance(data, bool) and kind is not bool
    if wrong_bool or not isinstance(data, kind):
        words = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise CodecError(f"{path}: found {str(data)[:80]!r}, expected {words}")
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def publication_to_json(publication: Publication) -> dict[str, Any]:
    """As in the `subscribe` frames."""
    return cast(dict[str, Any], to_json(publication))


def publication_from_json(data: Any) -> Publication:
    """Raises CodecError."""
    return from_json(Publication, data)


def incident_to_json(incident: Incident, *, evidence: bool = True) -> dict[str, Any]:
    """Whole, or without evidence and flight record as in lists."""
    shown = incident if evidence else dataclasses.replace(incident, evidence=(), flight=None)
    return cast(dict[str, Any], to_json(shown))


def incident_from_json(data: Any) -> Incident:
    """Raises CodecError."""
    return from_json(Incident, data)


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Every field of core's Diagnosis under its own name."""
    return cast(dict[str, Any], to_json(diagnosis))


def diagnosis_from_json(data: Any) -> Diagnosis:
    """Raises CodecError."""
    return from_json(Diagnosis, data)


def inflight_to_json(request: InflightRequest) -> dict[str, Any]:
    """As in the `report` verb."""
    return cast(dict[str, Any], to_json(request))


def inflight_from_json(data: Any) -> InflightRequest:
    """Raises CodecError."""
    return from_json(InflightRequest, data)


def limits_from_json(data: Any) -> EngineLimits:
    """As in the engine's /health and in `status`. Raises CodecError."""
    return from_json(EngineLimits, data)


def rung_to_json(rung: Rung) -> dict[str, Any]:
    """As in `status`."""
    return cast(dict[str, Any], to_json(rung))


def rung_from_json(data: Any) -> Rung:
    """Raises CodecError."""
    return from_json(Rung, data)


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """One fact; `data` values that are no JSON become their text."""
    return cast(dict[str, Any], to_json(evidence))


def evidence_from_json(data: Any) -> Evidence:
    """Raises CodecError."""
    return from_json(Evidence, data)
