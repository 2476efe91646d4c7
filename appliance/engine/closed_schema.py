"""JSON schemas as models are held to them: an object has the properties that are named, unless the schema says something of others.

JSON Schema lets any property follow, and a small model that may go on does not come to an end. What is said under the closed schema fits
the open one too. vLLM and SGLang close objects in the same way (xgrammar's strict mode).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_CONJUNCTIONS = ("allOf", "not", "if", "dependentSchemas")
"""What one part of these does not name, another may."""
_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "anyOf", "oneOf", "$ref")
)
_BY_NAME = frozenset(("properties", "$defs", "definitions"))
_BRANCHES = frozenset(("anyOf", "oneOf"))


def closed(schema: Schema) -> Schema:
    """The schema with its objects closed; as it is, where it puts objects together of parts."""
    text = json.dumps(schema)
    return schema if any(f'"{word}":' in text for word in _CONJUNCTIONS) else _closed(schema)


def _closed(schema: Schema) -> Schema:
    parts = {name: _part(name, value, is_object="properties" in schema) for name, value in schema.items()}
    named, required = parts.get("properties"), schema.get("required", [])
    known = isinstance(named, dict) and isinstance(required, list) and all(isinstance(one, str) and one in named for one in required)
    if known and not _SAYS_MORE & parts.keys():
        parts["additionalProperties"] = False
    return parts


def _part(name: str, value: object, *, is_object: bool) -> object:
    """Of a schema, by its keyword: values that are data, such as those of enum and default, stay as they are."""
    if name in _BY_NAME and isinstance(value, dict):
        return {key: _one(one) for key, one in value.items()}
    if (name in _BRANCHES and not is_object) or name in ("items", "prefixItems", "additionalProperties"):
        return [_one(one) for one in value] if isinstance(value, list) else _one(value)
    return value


def _one(value: object) -> object:
    return _closed(value) if isinstance(value, dict) else value
