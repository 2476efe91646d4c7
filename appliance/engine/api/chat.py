"""/v1/chat/completions: the conversation through the model's template; answers in OpenAI's form."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.engine.api.calls import CallReader, ToolCall
from appliance.engine.api.constraints import read_form
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, OpenAiEvents, others_of
from appliance.engine.api.fields import Fields, check_json, check_text
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.likelihood import ChatLogprobs, read_chat_logprobs
from appliance.engine.api.parameters import MOST_ANSWERS, check_model, encode_prompt, fit, read_priority, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.tools import call_json, constrain_answer, read_calls, read_tools
from appliance.engine.api.usage import StreamUsage, Tells, read_tells, usage
from appliance.engine.messages import FinishReason, GenerateRequest
from appliance.engine.template import TemplateRefused

_ROLES = ("system", "developer", "user", "assistant", "tool")

IGNORED = (
    "user",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Bookkeeping of hosted services: nothing in an answer depends on these."""


def read_chat(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a chat request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id = check_model(fields, model)
    messages = read_messages(fields)
    extra, end = read_template_variables(fields), read_end(fields, messages)
    sampling = read_sampling(fields, model.text, "max_completion_tokens", "max_tokens", most_answers=MOST_ANSWERS)
    logprobs, form, tools = read_chat_logprobs(fields), read_form(fields), read_tools(fields, model)
    constrain = constrain_answer(form, tools, model)
    stream, tells = read_stream(fields)
    priority = read_priority(fields)
    _refuse_unsupported(fields)
    fields.ignore(*IGNORED)
    fields.end()
    ticket = ticket or new_ticket("chatcmpl", sampling.seed)
    prompt_ids = encode_chat(messages, extra, model, ticket.created_s, tools.told, end)
    params = replace(fit(sampling, prompt_ids, model, "messages"), logprobs=logprobs)
    request = GenerateRequest(ticket.request_id, prompt_ids, params, constraint=constrain(), priority=priority)

    def shape(index: int) -> ChatShape:
        return ChatShape(ticket, model_id, StreamUsage(tells, len(prompt_ids)), ChatLogprobs(model.text), index, tools.reader())

    more = others_of([request] * sampling.answers, ticket.seed, constrain)
    others = tuple((other, shape(index)) for index, other in enumerate(more, 1))
    return Job(ticket, request, sampling.stops, stream, shape(0), others, shown={**sampling.shown, **tools.shown(model)})


def read_messages(fields: Fields) -> list[dict[str, object]]:
    """`messages` as a template takes them: text contents, known roles.

    Raises:
        ApiError: 400 naming the message at fault.
    """
    items = fields.items("messages")
    if not items:
        raise bad_request("messages must hold at least one message", "messages", "invalid_value")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]


def _read_message(item: object, where: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with role and content", where, "invalid_type")
    fields = Fields(item, where)
    role = fields.text("role")
    if role not in _ROLES:
        raise bad_request(
            f"{where}.role={role!r} is not supported by this engine; one of {', '.join(_ROLES)}", f"{where}.role", "invalid_value"
        )
    # OpenAI renamed `system` for its newer models; the templates of open models know the old name.
    calls = read_calls(fields) if role == "assistant" else []
    content = "" if calls and fields.value("content") is None else _read_content(fields)
    message: dict[str, object] = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "reasoning_content", *(("tool_call_id",) if role == "tool" else ())):
        value = fields.text(name)
        if value is not None:
            message[name] = value
    if role != "assistant":
        fields.only("tool_calls", [])
    fields.only("annotations", [])
    for name in ("function_call", "audio", "refusal"):
        fields.only(name)
    fields.end()
    return message


def _read_content(fields: Fields) -> str:
    """The content as one text; text parts are joined by line breaks, as vLLM and SGLang do for text models."""
    value = fields.value("content")
    if not isinstance(value, list):
        text = fields.text("content")
        if text is None:
            raise bad_request(f"{fields.path('content')} is missing; send a string", fields.path("content"), "invalid_value")
        return text
    texts: list[str] = []
    for index, item in enumerate(value):
        where = f"{fields.path('content')}[{index}]"
        if not isinstance(item, dict) or item.get("type") != "text" or not isinstance(item.get("text"), str):
            kind = item.get("type") if isinstance(item, dict) else item
            raise bad_request(f"{where} of type {kind!r:.60} is not supported: this engine takes text only", where, "unsupported_content")
        texts.append(check_text(item["text"], where))
    return "\n".join(texts)


class End(enum.Enum):
    """Where a rendered conversation ends."""

    NEW_ANSWER = "where the assistant begins"
    CLOSED = "behind the last message"
    OPEN = "inside the last message, which the answer goes on with"


def read_end(fields: Fields, messages: Sequence[Mapping[str, object]]) -> End:
    """`add_generation_prompt` and `continue_final_message`, as vLLM and SGLang have them."""
    goes_on = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", default=not goes_on)
    if not goes_on:
        return End.NEW_ANSWER if begins else End.CLOSED
    if begins:
        message = "continue_final_message=true needs add_generation_prompt=false: an answer cannot begin and go on"
        raise bad_request(message, "add_generation_prompt", "invalid_value")
    last = f"messages[{max(0, len(messages) - 1)}]"
    if not messages or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        raise bad_request(f"continue_final_message=true needs {last} to be the assistant's, and to call no tools", last, "invalid_value")
    return End.OPEN


def read_template_variables(fields: Fields) -> Mapping[str, object]:
    """`chat_template_kwargs`, such as Qwen3's `enable_thinking`."""
    value = fields.value("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs", "invalid_type")
    check_json(value, "chat_template_kwargs")
    return value


def encode_chat(
    messages: list[dict[str, object]],
    extra: Mapping[str, object],
    model: LoadedModel,
    at_s: float | None = None,
    tools: Sequence[Mapping[str, object]] = (),
    end: End = End.NEW_ANSWER,
) -> tuple[int, ...]:
    """Token ids of a conversation. `at_s`: when it began, where that is not now.

    Raises:
        ApiError: 400: a base model, or the template refuses; 422: far too long.
    """
    template = model.text.chat_template
    if template is None:
        raise bad_request(
            f"{model.limits.model_id!r} is a base model without a chat template; use /v1/completions with a prompt",
            "messages",
            "no_chat_template",
        )
    if not template.calls_tools:
        _refuse_tools(messages)
    try:
        if end is End.OPEN:
            rendered = template.render_open(messages, extra, at_s, tools)
        else:
            rendered = template.render(messages, extra, at_s, tools, generation_prompt=end is End.NEW_ANSWER)
    except TemplateRefused as refusal:
        raise bad_request(f"the model's chat template refuses this conversation: {refusal}", "messages", "template_refused") from None
    # The template writes BOS itself where the model wants one.
    return encode_prompt(check_text(rendered, "messages"), model, "messages", add_special_tokens=False)


def _refuse_tools(messages: Sequence[Mapping[str, object]]) -> None:
    """For a template that would render them as something else, or not at all."""
    for index, message in enumerate(messages):
        where = f"messages[{index}].role" if message["role"] == "tool" else f"messages[{index}].tool_calls"
        if message["role"] == "tool" or "tool_calls" in message:
            raise bad_request(f"{where} of 'tool' calls: this model's chat template knows of none", where, "unsupported_content")


def read_stream(fields: Fields) -> tuple[bool, Tells]:
    """`stream`, and what its chunks report of the usage."""
    stream = fields.flag("stream")
    if not stream and fields.value("stream_options") is not None:
        raise bad_request("stream_options needs stream=true", "stream_options", "invalid_value")
    return stream, read_tells(fields)


def _refuse_unsupported(fields: Fields) -> None:
    for name, neutral in (("functions", []), ("store", False)):
        fields.only(name, neutral)
    fields.only("function_call", "none", "auto")
    fields.only("modalities", ["text"])
    for name in ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"):
        fields.only(name)


class ChatShape(OpenAiEvents):
    """`chat.completion`, and its chunks: the role, the text, the finish reason, the usage if asked for."""

    def __init__(
        self,
        ticket: Ticket,
        model_id: str,
        tells: StreamUsage,
        logprobs: ChatLogprobs,
        index: int = 0,
        calls: CallReader | None = None,
    ) -> None:
        """`calls` reads the calls out of what the model says; None: it was offered no tools."""
        created = int(ticket.created_s)
        self._frame: Json = {"id": ticket.request_id, "object": "chat.completion", "created": created, "model": model_id}
        self._usage = tells
        self._logprobs = logprobs
        self._index = index
        self._calls = calls

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if self._calls is not None:
            said, calls = self._calls.feed(piece.text)
            rest, last = self._calls.flush(cut=ending.finish is FinishReason.LENGTH)
            message["content"] = said + rest
            if calls or last:
                message |= {"content": said + rest or None, "tool_calls": self._numbered([*calls, *last], 0)}
        choice = {"index": self._index, "message": message, "logprobs": self._logprobs.of(piece), "finish_reason": self._reason(ending)}
        return {**self._frame, "choices": [choice], "usage": usage(ending)}

    def begin(self) -> list[Json]:
        """The role."""
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def piece(self, piece: Piece) -> list[Json]:
        """New text and calls, if any are certain yet, and how likely the tokens were."""
        self._usage.add(piece)
        logprobs = self._logprobs.of(piece)
        said, calls = (piece.text, []) if self._calls is None else self._calls.feed(piece.text)
        delta = self._delta(said, calls)
        return [self._chunk(delta, None, logprobs)] if delta or logprobs else []

    def end(self, ending: Ending) -> list[Json]:
        """The finish reason, with what was held back; and the usage in a chunk without choices."""
        said, calls = ("", []) if self._calls is None else self._calls.flush(cut=ending.finish is FinishReason.LENGTH)
        chunks = [self._chunk(self._delta(said, calls), self._reason(ending))]
        last = self._usage.at_end(ending)
        return [*chunks, {**self._frame, "object": "chat.completion.chunk", **last}] if last else chunks

    def _delta(self, said: str, calls: list[ToolCall]) -> Json:
        delta: Json = {"content": said} if said else {}
        if calls and self._calls is not None:
            first = self._calls.calls - len(calls)
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(self._numbered(calls, first))]
        return delta

    def _numbered(self, calls: list[ToolCall], first: int) -> list[Json]:
        return [call_json(call, self._frame["id"], self._index, number) for number, call in enumerate(calls, first)]

    def _reason(self, ending: Ending) -> str:
        called = self._calls is not None and self._calls.calls and ending.finish is FinishReason.STOP
        return "tool_calls" if called else ending.finish.value

    def _chunk(self, delta: Json, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._frame, "object": "chat.completion.chunk", "choices": [choice], **self._usage.of_chunk()}
