"""Schemas whose objects are closed where nothing is said of further properties."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.engine.closed_schema import closed

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SHUT = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, SHUT),
        ({"type": "array", "items": CITY}, {"type": "array", "items": SHUT}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"c": CITY}, "$ref": "#/$defs/c"}, {"$defs": {"c": SHUT}, "$ref": "#/$defs/c"}),
        ({"properties": {"a": CITY}}, {"properties": {"a": SHUT}, "additionalProperties": False}),
        ({"type": "object", "additionalProperties": CITY}, {"type": "object", "additionalProperties": SHUT}),
    ],
)
def test_objects_are_closed_wherever_they_stand(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    """At the top, in lists, among alternatives, by reference, inside others."""
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**CITY, "additionalProperties": True},
        {**CITY, "patternProperties": {"^x": {}}},
        {**CITY, "required": ["city", "land"]},
        {**CITY, "anyOf": [{"properties": {"land": {}}, "required": ["land"]}, {}]},
        {"allOf": [CITY, {"properties": {"land": {}}}]},
        {"$defs": {"c": CITY}, "allOf": [{"$ref": "#/$defs/c"}]},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
        {"const": {"properties": {"a": 1}}},
        {},
    ],
)
def test_what_says_more_is_left_as_it_is(schema: dict[str, Any]) -> None:
    """Free objects, those that allow others, parts of a whole, and values that only look like schemas."""
    assert closed(schema) == schema
