"""Tools: what a client offers, how the model is told, and how its calls go out.

The model's own chat template decides in which dialect it is told and read (engine/dialect.py, calls.py). One that writes calls in another
form, or tells of no tools, is refused by name: a call that nobody recognises would reach the client as text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.engine.api.calls import CallReader, ToolCall, parsed, reader_of
from appliance.engine.api.constraints import Constrain, Form, anything, constrained
from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields, check_json, check_text, strict_json
from appliance.engine.api.service import LoadedModel
from appliance.engine.dialect import Dialect

if TYPE_CHECKING:
    from appliance.engine.grammar import Grammars

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Json = dict[str, Any]
_ANY_ARGUMENTS: Json = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tools:
    """What a client offers.

    Attributes:
        told: as the template takes them; empty: the model is told of none.
        schemas: parameters by name.
        must: the names of which one must be called; empty: the model may choose.
        parallel: several calls may be made at once. Otherwise what follows the first one is dropped.
        named: one tool was named: it is called once.
        dialect: how the model writes calls.
    """

    told: tuple[Json, ...] = ()
    schemas: Mapping[str, Json] | None = None
    must: tuple[str, ...] = ()
    parallel: bool = True
    named: bool = False
    dialect: Dialect = Dialect.HERMES

    def reader(self) -> CallReader | None:
        """Of one answer's calls; None: there can be none."""
        return reader_of(self.dialect, self.parallel, self.schemas or (), self.must) if self.told else None

    def shown(self, model: LoadedModel) -> Mapping[int, bytes]:
        """The special tokens that the reader has to see."""
        return model.text.marks(self.dialect.marks) if self.told else {}


NO_TOOLS = Tools()


@dataclass(frozen=True, slots=True)
class Choice:
    """`tool_choice`.

    Attributes:
        must: the names of which one must be called.
        named: there is one, by name.
        none: the model is told of no tools.
    """

    must: tuple[str, ...] = ()
    named: bool = False
    none: bool = False


def read_tools(fields: Fields, model: LoadedModel) -> Tools:
    """`tools`, `tool_choice`, `parallel_tool_calls`.

    Raises:
        ApiError: 400: a wrong one, or this model's template takes none.
    """
    items = fields.items("tools") or []
    parallel = fields.flag("parallel_tool_calls", default=True)
    choice = fields.value("tool_choice")
    if not items:
        if choice not in (None, "none", "auto"):
            message = f"tool_choice={choice!r:.80} demands a call, and there are no tools; send tools, or leave it out"
            raise bad_request(message, "tool_choice", "invalid_value")
        return NO_TOOLS
    read = [_read_tool(item, f"tools[{index}]") for index, item in enumerate(items)]
    return offered(read, _read_choice(choice, tuple(tool["function"]["name"] for tool in read)), model, parallel)


def offered(told: list[Json], choice: Choice, model: LoadedModel, parallel: bool) -> Tools:
    """Tools that were read, in the model's dialect.

    Raises:
        ApiError: 400: two have one name, or this model's template takes none.
    """
    if len(told) > MOST_TOOLS:
        raise bad_request(f"tools has {len(told)} entries; at most {MOST_TOOLS} are taken", "tools", "invalid_value")
    template = model.text.chat_template
    if template is not None and template.dialect is None:
        known = "; ".join(dialect.value for dialect in Dialect)
        message = f"the chat template of {model.limits.model_id!r} has calls in no form that is known here ({known}); leave out tools"
        raise bad_request(message, "tools", "unsupported_parameter")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in told}
    if len(schemas) < len(told):
        raise bad_request("two of tools have the same name", "tools", "invalid_value")
    if choice.none or not told:
        return NO_TOOLS
    dialect = template.dialect if template is not None and template.dialect is not None else Dialect.HERMES
    parallel = parallel and not (template is not None and template.one_call)
    return Tools(tuple(told), schemas, choice.must, parallel, choice.named, dialect)


def _read_tool(item: object, where: str) -> Json:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with type and function", where, "invalid_type")
    fields = Fields(item, where)
    fields.only("type", "function")
    function = fields.nested("function")
    fields.end()
    name, description = function.text("name"), function.text("description")
    parameters = function.value("parameters")
    function.ignore("strict")
    function.end()
    return told_tool(name, description, parameters, function.path("name"), function.path("parameters"))


def told_tool(name: str | None, description: str | None, parameters: object, name_path: str, schema_path: str) -> Json:
    """A tool as templates take it.

    Raises:
        ApiError: 400: no name, or no schema.
    """
    if name is None or not _NAME.fullmatch(name):
        raise bad_request(f"{name_path}={name!r:.80} is no name of 1 to 128 letters, digits, _, . and -", name_path, "invalid_value")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_request(f"{schema_path} must be a JSON schema, an object", schema_path, "invalid_type")
    check_json(parameters, schema_path)
    told = {"name": name, "description": description or "", "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": told}


def _read_choice(choice: object, names: tuple[str, ...]) -> Choice:
    if choice in (None, "auto", "none"):
        return Choice(none=choice == "none")
    if choice == "required":
        return Choice(names)
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if name not in names:
        raise bad_request(
            f"tool_choice={choice!r:.80} is none of none, auto, required, nor a function of tools: {', '.join(names)[:200]}",
            "tool_choice",
            "invalid_value",
        )
    return Choice((str(name),), named=True)


def constrain_calls(tools: Tools, model: LoadedModel) -> Constrain | None:
    """Where a call must be made: a grammar of nothing but such calls. None: the model may say what it likes.

    Raises:
        ApiError: 400: a schema that cannot be followed.
    """
    if not tools.must:
        return None

    def spelled(grammars: Grammars) -> str:
        from appliance.engine.api.forced_calls import forced_calls  # with llguidance, which nobody else pays for

        return forced_calls(tools, model.text, grammars)

    return constrained(model, spelled, "tools")


def constrain_answer(form: Form | None, tools: Tools, model: LoadedModel) -> Constrain:
    """With a form and tools that the model may call, the answer is either: of that form, or calls.

    Raises:
        ApiError: 400: a call is demanded and a form too, or one of them cannot be followed.
    """
    calls = constrain_calls(tools, model)
    if form is None:
        return calls or anything
    if calls is not None:
        message = f"tool_choice demands a call, {form.where} something else; send one of them"
        raise bad_request(message, "tool_choice", "invalid_value")
    if not tools.told or not tools.schemas:
        return constrained(model, form.spelled, form.where)
    # As where there is no form: the model's own calls are not held to their schemas, only to the tools' names.
    may = replace(tools, must=tuple(tools.schemas), schemas=dict.fromkeys(tools.schemas, _ANY_ARGUMENTS))

    def spelled(grammars: Grammars) -> str:
        from appliance.engine.api.forced_calls import forced_calls

        return grammars.either([forced_calls(may, model.text, grammars), form.spelled(grammars)])

    return constrained(model, spelled, form.where)


def call_json(call: ToolCall, request_id: str, choice: int, index: int) -> Json:
    """OpenAI's object."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id("call", request_id, choice, index), "type": "function", "function": function}


def call_id(kind: str, request_id: str, choice: int, index: int) -> str:
    """A call's id follows from its request's, so that it is the same over a crash."""
    return f"{kind}_{hashlib.blake2b(f'{request_id}/{choice}/{index}'.encode(), digest_size=12).hexdigest()}"


def arguments_of(call: ToolCall) -> Json:
    """As an object; what the model said instead of one stands in it as `raw`."""
    value = parsed(call.arguments)
    return value if isinstance(value, dict) else {"raw": call.arguments}


def read_calls(fields: Fields) -> list[Json]:
    """`tool_calls` of an assistant's message in a conversation, as templates take them: with arguments as objects."""
    calls: list[Json] = []
    for index, item in enumerate(fields.items("tool_calls") or []):
        where = f"{fields.path('tool_calls')}[{index}]"
        given = item if isinstance(item, dict) else {}
        function = given.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where} must have a function with a name and arguments", where, "invalid_value")
        arguments = function.get("arguments")
        try:
            value = strict_json(arguments or "{}") if isinstance(arguments, str) else arguments  # none came, where max_tokens cut it
        except (ValueError, RecursionError):
            raise bad_request(f"{where}.function.arguments is no JSON", f"{where}.function.arguments", "invalid_value") from None
        check_json(value, f"{where}.function.arguments")
        name = check_text(function["name"], f"{where}.function.name")
        call = {"type": "function", "function": {"name": name, "arguments": {} if value is None else value}}
        calls.append(call | ({"id": check_text(given["id"], f"{where}.id")} if isinstance(given.get("id"), str) else {}))
    return calls
