"""Tools: what a client offers, how the model is told, and the calls in what it says.

One form is read, that of Qwen, Hermes and those who follow them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Templates
that write another form, or none, are refused by name: a call that nobody recognises would reach the client as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.engine.api.constraints import Constrain, constrained
from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields
from appliance.engine.api.service import LoadedModel

if TYPE_CHECKING:
    from appliance.engine.grammar import Grammars

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAYBE_OPEN = re.compile(r"\s*(?:" + "|".join(re.escape(OPEN[:size]) for size in range(len(OPEN) - 1, 0, -1)) + r")?\Z")
"""White space at the end, and what may become a tag: not said before it is clear."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a client offers.

    Attributes:
        told: as the template takes them; empty: the model is told of none.
        schemas: parameters by name.
        must: the names of which one must be called; empty: the model may choose.
        parallel: several calls may be made at once. Otherwise what follows the first one is dropped.
        named: one tool was named: it is called once.
    """

    told: tuple[Json, ...] = ()
    schemas: Mapping[str, Json] | None = None
    must: tuple[str, ...] = ()
    parallel: bool = True
    named: bool = False


NO_TOOLS = Tools()


def read_tools(fields: Fields, model: LoadedModel) -> Tools:
    """`tools`, `tool_choice`, `parallel_tool_calls`.

    Raises:
        ApiError: 400: a wrong one, or this model's template takes none.
    """
    items = fields.items("tools") or []
    parallel = fields.flag("parallel_tool_calls", default=True)
    choice = fields.value("tool_choice")
    if not items:
        fields.only("tool_choice", "none", "auto")
        return NO_TOOLS
    if len(items) > MOST_TOOLS:
        raise bad_request(f"tools has {len(items)} entries; at most {MOST_TOOLS} are taken", "tools", "invalid_value")
    if model.text.chat_template is not None and not model.text.chat_template.calls_tools:
        message = f"the chat template of {model.limits.model_id!r} does not have calls written as {OPEN}...{CLOSE}; leave out tools"
        raise bad_request(message, "tools", "unsupported_parameter")
    read = [_read_tool(item, f"tools[{index}]") for index, item in enumerate(items)]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in read}
    if len(schemas) < len(read):
        raise bad_request("two of tools have the same name", "tools", "invalid_value")
    must = _read_choice(choice, tuple(schemas))
    return NO_TOOLS if choice == "none" else Tools(tuple(read), schemas, must, parallel, isinstance(choice, dict))


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
    if name is None or not _NAME.fullmatch(name):
        raise bad_request(f"{function.path('name')}={name!r:.80} is no name of 1 to 64 letters, digits, _, . and -", where, "invalid_value")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_request(f"{function.path('parameters')} must be a JSON schema, an object", where, "invalid_type")
    told = {"name": name, "description": description or "", "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": told}


def _read_choice(choice: object, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of which one must be called."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return names
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if name not in names:
        raise bad_request(
            f"tool_choice={choice!r:.80} is none of none, auto, required, nor a function of tools: {', '.join(names)[:200]}",
            "tool_choice",
            "invalid_value",
        )
    return (str(name),)


def constrain_calls(tools: Tools, model: LoadedModel) -> Constrain | None:
    """Where a call must be made: a grammar of nothing but such calls. None: the model may say what it likes.

    Raises:
        ApiError: 400: a schema that cannot be followed.
    """
    if not tools.must or tools.schemas is None:
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": tools.schemas[name]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in tools.must
    ]

    def spelled(grammars: Grammars) -> str:
        return grammars.framed(OPEN + "\n", {"anyOf": calls}, "\n" + CLOSE, several=tools.parallel and not tools.named)

    return constrained(model, spelled, "tools")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON."""

    name: str
    arguments: str


class CallReader:
    """Takes the calls out of an answer's text, however it is cut into pieces. What only looks like one stays text."""

    def __init__(self, parallel: bool = True) -> None:
        """Not `parallel`: one call, and nothing after it."""
        self._parallel = parallel
        self._buffer = ""
        self._inside = False
        self.calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly none of a call, and the calls that are complete."""
        self._buffer += text
        said: str = ""
        calls: list[ToolCall] = []
        while self._parallel or not self.calls:
            tag = CLOSE if self._inside else OPEN
            before, found, after = self._buffer.partition(tag)
            if not found:
                break
            self._buffer, self._inside = after, not self._inside
            if tag is OPEN:
                said += before.rstrip()
                continue
            call = _call(before)
            if call is None:
                said += OPEN + before + CLOSE
            else:
                calls.append(call)
                self.calls += 1
        if not self._parallel and self.calls:
            self._buffer = ""
        elif not self._inside:
            held = _MAYBE_OPEN.search(self._buffer)
            at = held.start() if held else len(self._buffer)
            said, self._buffer = said + self._buffer[:at], self._buffer[at:]
        return said, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """At the end: a call whose closing tag is missing is one if it is whole."""
        rest, self._buffer = self._buffer, ""
        if not self._inside:
            return (rest.rstrip() if self.calls else rest), []
        call = _call(rest)
        if call is None:
            return OPEN + rest, []
        self.calls += 1
        return "", [call]


def _call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def call_json(call: ToolCall, request_id: str, choice: int, index: int) -> Json:
    """OpenAI's object; its id follows from the request's, so that it is the same over a crash."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return {"id": f"call_{digest}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


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
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise bad_request(f"{where}.function.arguments is no JSON", f"{where}.function.arguments", "invalid_value") from None
        call = {"type": "function", "function": {"name": function["name"], "arguments": {} if value is None else value}}
        calls.append(call | ({"id": given["id"]} if isinstance(given.get("id"), str) else {}))
    return calls
