"""/v1/messages: Anthropic's way to ask and to answer: text, tools and their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping

from appliance.engine.api.anthropic_blocks import read_conversation, read_message_tools
from appliance.engine.api.calls import CallReader, ToolCall
from appliance.engine.api.chat import encode_chat
from appliance.engine.api.constraints import anything
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, named_event
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.parameters import check_model, fit, read_priority, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.tools import arguments_of, call_id, constrain_calls
from appliance.engine.messages import FinishReason, GenerateRequest

_IGNORED = ("metadata", "service_tier", "container", "context_management", "inference_geo")
"""Bookkeeping of the hosted service."""
_NO_VARIABLES: Mapping[str, object] = {}
_TEXT_BEGINS: Json = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


def read_message_request(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id = check_model(fields, model)
    messages, tools = read_conversation(fields), read_message_tools(fields, model)
    constrain = constrain_calls(tools, model) or anything
    sampling = read_sampling(fields, model.text, "max_tokens", stop_name="stop_sequences")
    stream, priority = fields.flag("stream"), read_priority(fields)
    fields.ignore(*_IGNORED)
    fields.end()
    if sampling.max_new_tokens is None:
        raise bad_request("max_tokens is missing: how long the answer may become", "max_tokens", "invalid_value")
    ticket = ticket or new_ticket("msg", sampling.seed)
    prompt_ids = encode_chat(messages, _NO_VARIABLES, model, ticket.created_s, tools.told)
    params = fit(sampling, prompt_ids, model, "messages")
    request = GenerateRequest(ticket.request_id, prompt_ids, params, constraint=constrain(), priority=priority)
    shape = MessageShape(ticket.request_id, model_id, len(prompt_ids), tools.reader())
    return Job(ticket, request, sampling.stops, stream, shape, shown={**sampling.shown, **tools.shown(model)})


def count_message_tokens(fields: Fields, model: LoadedModel) -> Json:
    """/v1/messages/count_tokens: what such a request would be charged for its prompt."""
    check_model(fields, model)
    messages, tools = read_conversation(fields), read_message_tools(fields, model)
    fields.end()
    return {"input_tokens": len(encode_chat(messages, _NO_VARIABLES, model, tools=tools.told))}


class MessageShape:
    """`message`, and the named events of one. Its content is a list of blocks: texts and calls."""

    last = b""

    def __init__(self, request_id: str, model_id: str, prompt_tokens: int, calls: CallReader | None = None) -> None:
        """`calls` reads the calls out of what the model says; None: it was offered no tools, and there is one text, from the beginning."""
        self._frame: Json = {"id": request_id, "type": "message", "role": "assistant", "model": model_id}
        self._prompt_tokens = prompt_tokens
        self._calls = calls
        self._index = 0
        """Of the block that is open, or else of the next one."""
        self._text_open = calls is None

    def encode(self, value: Json) -> bytes:
        """By its type. An error's envelope has none yet."""
        return named_event(value["type"], value) if "type" in value else named_event("error", {"type": "error", **value})

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        said, calls = piece.text, list[ToolCall]()
        if self._calls is not None:
            said, calls = self._calls.feed(piece.text)
            rest, last = self._calls.flush(cut=ending.finish is FinishReason.LENGTH)
            said, calls = said + rest, [*calls, *last]
        content: list[Json] = [{"type": "text", "text": said}] if said or not calls else []
        content += [self._block(call, number, arguments_of(call)) for number, call in enumerate(calls)]
        return {**self._frame, "content": content, **self._stop(ending), "usage": _usage(ending)}

    def begin(self) -> list[Json]:
        """The message without content; and its only block, where there can be no other."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}, *([_TEXT_BEGINS] if self._calls is None else [])]

    def piece(self, piece: Piece) -> list[Json]:
        """New text and calls, if any are certain yet."""
        return self._said(*((piece.text, []) if self._calls is None else self._calls.feed(piece.text)))

    def end(self, ending: Ending) -> list[Json]:
        """What was held back; the block ends, why, and the message."""
        events = [] if self._calls is None else self._said(*self._calls.flush(cut=ending.finish is FinishReason.LENGTH))
        if not self._text_open and not self._index:
            events.append(_TEXT_BEGINS)  # nothing was said: clients expect a block all the same
            self._text_open = True
        why = {"type": "message_delta", "delta": self._stop(ending), "usage": _usage(ending)}
        return [*events, *self._close_text(), why, {"type": "message_stop"}]

    def _said(self, text: str, calls: list[ToolCall]) -> list[Json]:
        events: list[Json] = []
        if text and not self._text_open:
            events.append({**_TEXT_BEGINS, "index": self._index})
            self._text_open = True
        if text:
            events.append({"type": "content_block_delta", "index": self._index, "delta": {"type": "text_delta", "text": text}})
        first = 0 if self._calls is None else self._calls.calls - len(calls)
        for number, call in enumerate(calls, first):
            events += [*self._close_text(), *self._call(call, number)]
        return events

    def _call(self, call: ToolCall, number: int) -> list[Json]:
        """A block of its own, its input in one piece."""
        index, self._index = self._index, self._index + 1
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments_of(call), ensure_ascii=False)}
        return [
            {"type": "content_block_start", "index": index, "content_block": self._block(call, number, {})},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]

    def _close_text(self) -> list[Json]:
        if not self._text_open:
            return []
        self._text_open, self._index = False, self._index + 1
        return [{"type": "content_block_stop", "index": self._index - 1}]

    def _block(self, call: ToolCall, number: int, given: Json) -> Json:
        return {"type": "tool_use", "id": call_id("toolu", self._frame["id"], 0, number), "name": call.name, "input": given}

    def _stop(self, ending: Ending) -> Json:
        if ending.matched_stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.matched_stop}
        if ending.finish is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        called = self._calls is not None and self._calls.calls
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _usage(ending: Ending) -> Json:
    """Anthropic counts what came out of a cache apart from the input."""
    return {
        "input_tokens": ending.prompt_tokens - ending.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ending.cached_tokens,
        "output_tokens": ending.completion_tokens,
    }
