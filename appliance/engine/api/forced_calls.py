"""The grammar of an answer that must be a call: in the model's own dialect, its special tokens as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.engine.dialect import ARGS, CALL_ID, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS, Dialect
from appliance.engine.grammar import Frame, exactly, matching, token

if TYPE_CHECKING:
    from appliance.engine.api.tools import Tools
    from appliance.engine.grammar import Grammars
    from appliance.engine.text import ModelText

Json = dict[str, Any]


def forced_calls(tools: Tools, text: ModelText, grammars: Grammars) -> str:
    """Calls of the tools that must be called, and nothing else."""
    several = tools.parallel and not tools.named
    ids = {name.decode(): token_id for token_id, name in text.marks(tools.dialect.marks).items()}

    def mark(name: str) -> str:
        return token(ids[name]) if name in ids else exactly(name)

    match tools.dialect:
        case Dialect.HERMES:
            frame = Frame(mark(TOOL_CALL) + exactly("\n"), _any_call(tools, "arguments"), exactly("\n") + mark(TOOL_CALL_END))
            return grammars.framed([frame], "\n", several)
        case Dialect.LLAMA:
            return grammars.framed([Frame("", _any_call(tools, "parameters"))], "; ", several)
        case Dialect.MISTRAL_LIST:
            calls: Json = {"type": "array", "items": _any_call(tools, "arguments"), "minItems": 1}
            calls |= {} if several else {"maxItems": 1}
            return grammars.framed([Frame(mark(TOOL_CALLS) + exactly(" "), calls)], "", several=False)
        case _:
            number = mark(CALL_ID) + matching("[a-zA-Z0-9]{9}") if tools.dialect is Dialect.MISTRAL_NUMBERED else ""
            frames = [Frame(mark(TOOL_CALLS) + exactly(name) + number + mark(ARGS), _schema(tools, name)) for name in tools.must]
            return grammars.framed(frames, "", several)


def _any_call(tools: Tools, arguments: str) -> Json:
    return {"anyOf": [_call(name, arguments, _schema(tools, name)) for name in tools.must]}


def _call(name: str, arguments: str, schema: Json) -> Json:
    # With an id it is a schema of its own in here: its `#/$defs/City` means what the client means.
    properties = {"name": {"const": name}, arguments: {"$id": f"urn:tool:{name}", **schema}}
    return {"type": "object", "properties": properties, "required": ["name", arguments], "additionalProperties": False}


def _schema(tools: Tools, name: str) -> Json:
    assert tools.schemas is not None, "who must be called was offered"
    return tools.schemas[name]
