"""What Anthropic's requests are made of, as templates take it: content blocks become messages, tools and their choice ours (tools.py)."""

from __future__ import annotations

from typing import Any

from appliance.engine.api.errors import ApiError, bad_request
from appliance.engine.api.fields import Fields, check_text
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.tools import NO_TOOLS, Choice, Tools, offered, told_tool

Json = dict[str, Any]
_ROLES = ("user", "assistant")
_TOOL_IGNORED = ("cache_control", "strict", "input_examples", "eager_input_streaming")


def read_conversation(fields: Fields) -> list[Json]:
    """`system` and `messages`.

    Raises:
        ApiError: 400 naming the message or block at fault.
    """
    items = fields.items("messages")
    if not items:
        raise bad_request("messages must hold at least one message", "messages", "invalid_value")
    system = _read_system(fields)
    messages: list[Json] = [] if system is None else [{"role": "system", "content": system}]
    for index, item in enumerate(items):
        messages += _read_message(item, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        where = f"messages[{len(items) - 1}]"
        raise bad_request(f"{where} is the assistant's: this engine does not go on with a given beginning", where, "unsupported_content")
    for name, neutral in (("mcp_servers", []), ("thinking", {"type": "disabled"})):
        fields.only(name, neutral)
    return messages


def read_message_tools(fields: Fields, model: LoadedModel) -> Tools:
    """`tools` and `tool_choice`.

    Raises:
        ApiError: 400: a wrong one, or this model's template takes none.
    """
    told = [_read_tool(item, f"tools[{index}]") for index, item in enumerate(fields.items("tools") or [])]
    chosen = fields.nested("tool_choice")
    kind, name = chosen.text("type") or "auto", chosen.text("name")
    parallel = not chosen.flag("disable_parallel_tool_use")
    chosen.end()
    names = tuple(tool["function"]["name"] for tool in told)
    choices = {"auto": Choice(), "none": Choice(none=True), "any": Choice(names), "tool": Choice((name or "",), named=True)}
    if kind not in choices:
        raise bad_request(f"tool_choice.type={kind!r:.60} is none of {', '.join(choices)}", "tool_choice.type", "invalid_value")
    if kind == "any" and not told:
        raise bad_request("tool_choice demands a call, and there are no tools", "tool_choice", "invalid_value")
    if kind == "tool" and name not in names:
        message = f"tool_choice.name={name!r:.80} is none of tools: {', '.join(names)[:200]}"
        raise bad_request(message, "tool_choice.name", "invalid_value")
    return offered(told, choices[kind], model, parallel) if told else NO_TOOLS


def _read_tool(item: object, where: str) -> Json:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with name and input_schema", where, "invalid_type")
    fields = Fields(item, where)
    fields.only("type", "custom")
    name, description, schema = fields.text("name"), fields.text("description"), fields.value("input_schema")
    fields.ignore(*_TOOL_IGNORED)
    fields.end()
    return told_tool(name, description, schema, fields.path("name"), fields.path("input_schema"))


def _read_message(item: object, where: str) -> list[Json]:
    """One message; or several, where results of tools stand beside each other or beside text."""
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with role and content", where, "invalid_type")
    fields = Fields(item, where)
    role, content = fields.text("role"), fields.value("content")
    fields.end()
    if role not in _ROLES:
        raise bad_request(f"{where}.role={role!r:.60} is neither user nor assistant", f"{where}.role", "invalid_value")
    if content is None:
        raise bad_request(f"{where}.content is missing; send a string", f"{where}.content", "invalid_value")
    where += ".content"
    if not isinstance(content, list):
        return [{"role": role, "content": Fields({"content": content}, where.removesuffix(".content")).text("content")}]
    return _read_answer(content, where) if role == "assistant" else _read_question(content, where)


def _read_answer(blocks: list[object], where: str) -> list[Json]:
    """Text, and the calls that it ended in."""
    texts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if not isinstance(block, dict) or block.get("type") != "tool_use":
            texts.append(_text_of(block, at))
            continue
        call_id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, dict):
            raise bad_request(f"{at} must have an id, a name and an input, an object", at, "invalid_value")
        function = {"name": check_text(name, f"{at}.name"), "arguments": given}
        calls.append({"id": check_text(call_id, f"{at}.id"), "type": "function", "function": function})
    message: Json = {"role": "assistant", "content": "\n".join(texts)}
    return [message | ({"tool_calls": calls} if calls else {})]


def _read_question(blocks: list[object], where: str) -> list[Json]:
    """Results of tools, a message each, and text."""
    messages: list[Json] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            messages.append(_read_result(block, at))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + _text_of(block, at)
        else:
            messages.append({"role": "user", "content": _text_of(block, at)})
    return messages or [{"role": "user", "content": ""}]


def _read_result(block: Json, at: str) -> Json:
    """That it is an error, its own text says; templates know of no other place."""
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise bad_request(f"{at} must have a tool_use_id, that of the call", at, "invalid_value")
    text = _joined(content, f"{at}.content") if content is not None else "error" if block.get("is_error") is True else ""
    return {"role": "tool", "tool_call_id": check_text(call_id, f"{at}.tool_use_id"), "content": text}


def _read_system(fields: Fields) -> str | None:
    value = fields.value("system")
    return fields.text("system") if not isinstance(value, list) else _joined(value, fields.path("system"))


def _joined(content: object, where: str) -> str:
    """A string, or a list of text blocks."""
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of text blocks", where, "invalid_type")
    return "\n".join(_text_of(block, f"{where}[{index}]") for index, block in enumerate(content))


def _text_of(block: object, where: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise _unsupported(block, where)
    return check_text(block["text"], where)


def _unsupported(block: object, where: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    return bad_request(
        f"{where} of type {kind!r:.60} is not supported here: this engine takes text, calls of tools from the assistant and their results",
        where,
        "unsupported_content",
    )
