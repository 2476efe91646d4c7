"""/v1/messages: Anthropic's way to ask and to answer, text only."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engine.api.chat import encode_chat
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, named_event
from appliance.engine.api.fields import Fields, check_text
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.parameters import check_model, fit, read_priority, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.messages import FinishReason, GenerateRequest

_IGNORED = ("metadata", "service_tier", "container", "context_management", "inference_geo")
"""Bookkeeping of the hosted service."""
_ROLES = ("user", "assistant")
_NO_VARIABLES: Mapping[str, object] = {}


def read_message_request(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id = check_model(fields, model)
    messages = _read_conversation(fields)
    sampling = read_sampling(fields, model.text, "max_tokens", stop_name="stop_sequences")
    stream, priority = fields.flag("stream"), read_priority(fields)
    fields.ignore(*_IGNORED)
    fields.end()
    if sampling.max_new_tokens is None:
        raise bad_request("max_tokens is missing: how long the answer may become", "max_tokens", "invalid_value")
    ticket = ticket or new_ticket("msg", sampling.seed)
    prompt_ids = encode_chat(messages, _NO_VARIABLES, model, ticket.created_s)
    request = GenerateRequest(ticket.request_id, prompt_ids, fit(sampling, prompt_ids, model, "messages"), priority=priority)
    return Job(ticket, request, sampling.stops, stream, MessageShape(ticket.request_id, model_id, len(prompt_ids)))


def count_message_tokens(fields: Fields, model: LoadedModel) -> Json:
    """/v1/messages/count_tokens: what such a request would be charged for its prompt."""
    check_model(fields, model)
    messages = _read_conversation(fields)
    fields.end()
    return {"input_tokens": len(encode_chat(messages, _NO_VARIABLES, model))}


def _read_conversation(fields: Fields) -> list[dict[str, object]]:
    """`system` and `messages` as a template takes them."""
    items = fields.items("messages")
    if not items:
        raise bad_request("messages must hold at least one message", "messages", "invalid_value")
    system = _read_text(fields, "system")
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    messages += [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]
    if messages[-1]["role"] == "assistant":
        where = f"messages[{len(items) - 1}]"
        raise bad_request(f"{where} is the assistant's: this engine does not go on with a given beginning", where, "unsupported_content")
    for name, neutral in (("tools", []), ("mcp_servers", []), ("thinking", {"type": "disabled"})):
        fields.only(name, neutral)
    fields.only("tool_choice", {"type": "none"}, {"type": "auto"})
    return messages


def _read_message(item: object, where: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with role and content", where, "invalid_type")
    fields = Fields(item, where)
    role, content = fields.text("role"), _read_text(fields, "content")
    fields.end()
    if role not in _ROLES:
        raise bad_request(f"{where}.role={role!r:.60} is neither user nor assistant", f"{where}.role", "invalid_value")
    if content is None:
        raise bad_request(f"{where}.content is missing; send a string", f"{where}.content", "invalid_value")
    return {"role": role, "content": content}


def _read_text(fields: Fields, name: str) -> str | None:
    """A string, or a list of text blocks."""
    value = fields.value(name)
    if not isinstance(value, list):
        return fields.text(name)
    texts: list[str] = []
    for index, block in enumerate(value):
        where = f"{fields.path(name)}[{index}]"
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise bad_request(f"{where} of type {kind!r:.60} is not supported: this engine takes text only", where, "unsupported_content")
        texts.append(check_text(block["text"], where))
    return "\n".join(texts)


class MessageShape:
    """`message`, and the named events of one."""

    last = b""

    def __init__(self, request_id: str, model_id: str, prompt_tokens: int) -> None:
        self._frame: Json = {"id": request_id, "type": "message", "role": "assistant", "model": model_id}
        self._prompt_tokens = prompt_tokens

    def encode(self, value: Json) -> bytes:
        """By its type. An error's envelope has none yet."""
        return named_event(value["type"], value) if "type" in value else named_event("error", {"type": "error", **value})

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        content = [{"type": "text", "text": piece.text}]
        return {**self._frame, "content": content, **_stop(ending), "usage": _usage(ending)}

    def begin(self) -> list[Json]:
        """The message without content, and its only block."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [{"type": "message_start", "message": message}, block]

    def piece(self, piece: Piece) -> list[Json]:
        """New text, if any is certain yet."""
        delta = {"type": "text_delta", "text": piece.text}
        return [{"type": "content_block_delta", "index": 0, "delta": delta}] if piece.text else []

    def end(self, ending: Ending) -> list[Json]:
        """The block ends, why, and the message."""
        why = {"type": "message_delta", "delta": _stop(ending), "usage": _usage(ending)}
        return [{"type": "content_block_stop", "index": 0}, why, {"type": "message_stop"}]


def _stop(ending: Ending) -> Json:
    if ending.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.matched_stop}
    return {"stop_reason": "max_tokens" if ending.finish is FinishReason.LENGTH else "end_turn", "stop_sequence": None}


def _usage(ending: Ending) -> Json:
    """Anthropic counts what came out of a cache apart from the input."""
    return {
        "input_tokens": ending.prompt_tokens - ending.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ending.cached_tokens,
        "output_tokens": ending.completion_tokens,
    }
