"""What an answer may say, as clients put it: `response_format`, `regex`, `json_schema`, `structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields, check_json, check_text, strict_json
from appliance.engine.api.service import LoadedModel
from appliance.engine.messages import Constraint

if TYPE_CHECKING:
    from appliance.engine.grammar import Grammars

MOST_GRAMMAR_CHARS = 256 * 1024
Spelled = Callable[["Grammars"], str]
"""The text of a grammar."""
Constrain = Callable[[], Constraint | None]
"""A constraint for one more answer; none where nothing was asked for."""


def anything() -> Constraint | None:
    """Nothing was asked for."""
    return None


def read_constraint(fields: Fields, model: LoadedModel, *, response_format: bool = True) -> Constrain:
    """The form that the answer must have.

    Raises:
        ApiError: 400: several, a wrong one, or one that cannot be followed.
    """
    form = read_form(fields, response_format=response_format)
    return anything if form is None else constrained(model, form.spelled, form.where)


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must be, and the field that says so."""

    where: str
    spelled: Spelled


def read_form(fields: Fields, *, response_format: bool = True) -> Form | None:
    """OpenAI's `response_format`, SGLang's `regex` and `json_schema` (the latter as a string or an object), vLLM's `structured_outputs`;
    one of them, or none.

    Raises:
        ApiError: 400: several, or a wrong one.
    """
    asked: dict[str, Spelled] = {}
    if response_format:
        asked |= _read_response_format(fields) | _read_structured_outputs(fields)
    pattern = fields.text("regex")
    if pattern is not None:
        asked[fields.path("regex")] = lambda grammars: grammars.regex(pattern)
    schema = fields.value("json_schema")
    if schema is not None:
        wanted = _parsed(schema, fields.path("json_schema"))
        asked[fields.path("json_schema")] = lambda grammars: grammars.json(wanted)
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} contradict each other; send one of them", list(asked)[-1], "invalid_value")
    return next((Form(where, spelled) for where, spelled in asked.items()), None)


def constrained(model: LoadedModel, spelled: Spelled, where: str) -> Constrain:
    """Compiled once now, so that what is wrong with it is said before anything is generated.

    Raises:
        ApiError: 400: it is wrong, cannot be followed, or the means are missing.
    """
    try:
        from appliance.engine.grammar import GrammarRefused

        grammars = model.text.grammars()
    except ImportError:
        message = f"{where} needs the Python package llguidance, which this engine's environment lacks; run `appliancectl setup` again"
        raise bad_request(message, where, "unsupported_parameter") from None
    try:
        text = spelled(grammars)
        if len(text) > MOST_GRAMMAR_CHARS:
            raise bad_request(f"{where} has {len(text)} characters; at most {MOST_GRAMMAR_CHARS} are taken", where, "invalid_value")
        first: list[Constraint] = [grammars.constraint(text)]
    except RecursionError:
        raise bad_request(f"{where} cannot be followed: a schema is nested too deeply", where, "invalid_grammar") from None
    except GrammarRefused as refusal:
        raise bad_request(f"{where} cannot be followed: {refusal}", where, "invalid_grammar") from None
    return lambda: first.pop() if first else grammars.constraint(text)


def _read_response_format(fields: Fields) -> dict[str, Spelled]:
    where = fields.path("response_format")
    if fields.value("response_format") is None:
        return {}
    form = fields.nested("response_format")
    kind = form.text("type")
    if kind == "text":
        form.end()
        return {}
    if kind == "json_object":
        form.end()
        return {where: lambda grammars: grammars.json({"type": "object"})}
    if kind == "json_schema":
        holder = form.nested("json_schema")
        schema = _parsed(holder.value("schema"), holder.path("schema"))
        holder.ignore("name", "description", "strict")  # what is followed is always followed strictly
        holder.end()
        form.end()
        return {where: lambda grammars: grammars.json(schema)}
    raise bad_request(f"{where}.type={kind!r:.60} is none of text, json_object, json_schema", f"{where}.type", "invalid_value")


def _read_structured_outputs(fields: Fields) -> dict[str, Spelled]:
    """vLLM's object (from 0.11), and the fields that it had for the same before: JSON of a schema, a pattern, one of several texts."""
    holder = fields.nested("structured_outputs")
    asked = _read_kinds(holder, "") | _read_kinds(fields, "guided_")
    for name, *neutral in (("grammar",), ("structural_tag",), ("whitespace_pattern",), ("disable_any_whitespace", False)):
        holder.only(name, *neutral)
    holder.only("disable_additional_properties", False)
    holder.end()
    for name in ("guided_grammar", "guided_whitespace_pattern"):
        fields.only(name)
    fields.ignore("guided_decoding_backend")
    return asked


def _read_kinds(fields: Fields, prefix: str) -> dict[str, Spelled]:
    asked: dict[str, Spelled] = {}
    schema = fields.value(f"{prefix}json")
    if fields.flag(f"{prefix}json_object"):
        asked[fields.path(f"{prefix}json_object")] = lambda grammars: grammars.json({"type": "object"})
    if schema is not None:
        wanted = _parsed(schema, fields.path(f"{prefix}json"))
        asked[fields.path(f"{prefix}json")] = lambda grammars: grammars.json(wanted)
    pattern = fields.text(f"{prefix}regex")
    if pattern is not None:
        asked[fields.path(f"{prefix}regex")] = lambda grammars: grammars.regex(pattern)
    texts = _read_choice(fields, f"{prefix}choice")
    if texts:
        asked[fields.path(f"{prefix}choice")] = lambda grammars: grammars.choice(texts)
    return asked


def _read_choice(fields: Fields, name: str) -> tuple[str, ...]:
    items = fields.items(name)
    if items is None:
        return ()
    texts = tuple(check_text(item, fields.path(name)) for item in items if isinstance(item, str) and item)
    if not texts or len(texts) < len(items):
        raise bad_request(
            f"{fields.path(name)} must be a list of texts to choose from, none of them empty", fields.path(name), "invalid_value"
        )
    return texts


def _parsed(value: object, where: str) -> Mapping[str, object]:
    """A JSON schema: an object, or the text of one, as SGLang's clients send it."""
    if isinstance(value, str):
        try:
            value = strict_json(value)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{where} is no JSON: {error}", where, "invalid_value") from None
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be a JSON schema, an object", where, "invalid_type")
    check_json(value, where)
    return value
