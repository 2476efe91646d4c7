"""Server-sent events as they pass: whole events only, where the answer begins, and whether it ended.

Nothing is re-encoded. A client is only ever sent whole events, so that an error event can follow at any moment; and the
events that carry nothing of the answer yet (the role, `message_start`) are held back until one does, so that an engine
that dies in its prefill has sent nothing and the request can be given to the next one.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from appliance.gateway.envelope import Refused

WAITING_COMMENT = b": waiting\n\n"
RESTARTING_COMMENT = b": restarting engine\n\n"
BLANK = b"\n\n"
"""Means nothing to anybody: for clients that cannot be told a comment."""
EVENT_MAX_BYTES = 4 * 1024**2
"""A single event larger than this is passed on in pieces: our memory is bounded, its end can no longer be guarded."""
_OPENAI_PATHS = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
_PRELUDE_TYPES = frozenset(
    {
        "ping",
        "message_start",
        "content_block_start",
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)

_FAILURE = re.compile(rb'data: \{"error".*"code": ?5\d\d\b')


def is_read_by_hand(user_agent: bytes | None) -> bool:
    """Whether this client's HTTP library knows nothing of events, so that a program reads them that often takes all it finds for data.

    aiohttp is what the load generators of vLLM and SGLang are written with. vLLM's (0.10 to 0.33, endpoint_request_func.py) strips each
    packet: a comment that comes alone stays in front of the next event, and all of them are lost up to one that has company. SGLang's
    (0.5.23, benchmark/serving.py) takes each line for JSON.
    """
    return user_agent is not None and b"aiohttp/" in user_agent


class Dialect(enum.Enum):
    """How a stream says that it is complete, and how it says an error."""

    OPENAI = "openai"
    """`data: [DONE]`; also SGLang's /generate."""
    ANTHROPIC = "anthropic"
    """`event: message_stop`."""
    RESPONSES = "responses"
    """`event: response.completed`, `.incomplete` or `.failed`."""
    UNKNOWN = "unknown"
    """An endpoint whose streams we know nothing of: complete is what is complete as HTTP."""


_LAST_EVENTS = {
    Dialect.OPENAI: frozenset[str](),
    Dialect.UNKNOWN: frozenset[str](),
    Dialect.ANTHROPIC: frozenset({"message_stop", "error"}),
    Dialect.RESPONSES: frozenset({"response.completed", "response.incomplete", "response.failed", "error"}),
}


def dialect_of(path: str) -> Dialect:
    """The dialect of an endpoint."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    if path.startswith("/v1/responses"):
        return Dialect.RESPONSES
    return Dialect.OPENAI if path in _OPENAI_PATHS else Dialect.UNKNOWN


class Framer:
    """Cuts a stream behind its last whole event; keeps the rest until the event is complete."""

    __slots__ = ("_carry", "_last")

    def __init__(self) -> None:
        self._carry = b""
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        """Whole events, possibly none. The usual chunk is exactly that and is returned as it came."""
        if self._carry:
            data = self._carry + data
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self._carry = b""
            self._last = data
            return data
        cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if cut <= 3:  # rfind gave -1 for both
            cut = len(data) if len(data) > EVENT_MAX_BYTES else 0
        self._carry = data[cut:]
        if cut:
            self._last = data[:cut]
        return data[:cut]

    def rest(self) -> bytes:
        """What stands after the last whole event: an event that its sender did not close with an empty line."""
        return self._carry

    def finished(self, dialect: Dialect) -> bool:
        """Whether the last event is one that ends a stream: its dialect's own, or an error."""
        if dialect is Dialect.UNKNOWN:
            return True
        events = _events(self._carry) or _events(self._last)
        return bool(events) and _ends(events[-1], dialect)


def is_engine_failure(whole: bytes) -> bool:
    """Whether an event is an error of the engine itself: SGLang and vLLM number it as HTTP does. It may be its last words."""
    return b'data: {"error"' in whole and any(_FAILURE.match(event) for event in _events(whole))


def is_prelude(whole: bytes) -> bool:
    """Whether none of these events carries anything of the answer."""
    return all(_is_prelude(event) for event in _events(whole))


def error_event(refused: Refused, dialect: Dialect) -> bytes:
    """The event that ends a broken stream. No [DONE] follows: a client that looks for it must not find it."""
    error = refused.error()
    if dialect is Dialect.ANTHROPIC:
        inner = {**error, "type": "overloaded_error" if refused.status in (429, 503) else "api_error"}
        return named_event("error", {"type": "error", "error": inner})
    if dialect is Dialect.RESPONSES:
        return named_event("error", {"type": "error", **{key: value for key, value in error.items() if key != "type"}})
    return b"data: " + refused.body() + b"\n\n"


def as_events(body: bytes) -> bytes:
    """A whole JSON answer for a client that was already promised a stream: one event and the end."""
    return b"data: " + body.replace(b"\r", b"").replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n"


def named_event(name: str, document: dict[str, Any]) -> bytes:
    """As Anthropic and OpenAI's Responses have them."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(document).encode())


def _events(data: bytes) -> list[bytes]:
    return [event for event in data.replace(b"\r\n", b"\n").split(b"\n\n") if event.strip()]


def _fields(event: bytes) -> tuple[str, bytes]:
    """The event's name and its data; empty where it has none."""
    name, data = "", []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
    return name, b"\n".join(data)


def _ends(event: bytes, dialect: Dialect) -> bool:
    name, data = _fields(event)
    return data == b"[DONE]" or name in _LAST_EVENTS[dialect] or data.startswith((b'{"error"', b'{"type":"error"', b'{"type": "error"'))


def _is_prelude(event: bytes) -> bool:
    _, data = _fields(event)
    if not data:
        return True  # a comment
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(document, dict) or "error" in document:
        return False
    choices = document.get("choices")
    if isinstance(choices, list):
        return bool(choices) and all(_only_role(choice) for choice in choices)
    return document.get("type") in _PRELUDE_TYPES


def _only_role(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
        return False
    delta = choice.get("delta")
    return isinstance(delta, dict) and not any(value for name, value in delta.items() if name != "role")
