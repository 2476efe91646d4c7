"""What an answer cost, read from the bytes that its client is sent: tokens, and the pace at which they came.

Engines say in the answer how many tokens it took (`usage`, SGLang's `meta_info`). Only that object is parsed, once, when
the answer is complete. A stream that says nothing is counted by its events, which is close and is marked as such.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from appliance.gateway.metrics import Metrics
from appliance.gateway.schedule import Ticket

_MARKS = (b'"usage"', b'"meta_info"')
_DECODER = json.JSONDecoder()
_USAGE_MAX_BYTES = 64 * 1024
_FRAME_EVENTS = 2
"""Events of a stream that carry no token: the finish reason and [DONE]."""
_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as its engine counted them."""

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0


class PromptSizes:
    """How many tokens a body of so many bytes holds, learned from what engines say. English JSON has about a quarter."""

    def __init__(self) -> None:
        self.tokens_per_byte = 0.25

    def estimate(self, body_bytes: int) -> int:
        """Prompt tokens of a body; at least 1."""
        return max(1, round(body_bytes * self.tokens_per_byte))

    def learn(self, body_bytes: int, prompt_tokens: int) -> None:
        """A body of so many bytes had so many tokens."""
        if body_bytes > 0 and prompt_tokens > 0:
            seen = min(1.0, max(0.01, prompt_tokens / body_bytes))
            self.tokens_per_byte += _SMOOTHING * (seen - self.tokens_per_byte)


class Account:
    """One answer. Its client's writer tells it of every piece, and of the end.

    Attributes:
        usage: as the engine said it, once the answer is complete.
        events: server-sent events so far.
        answered: the engine has answered, whole or in part.
        last_s: of the last piece, on the loop's clock; 0 before.
    """

    __slots__ = ("_first_mark", "_last_mark", "_metrics", "_sizes", "_ticket", "answered", "body_bytes", "events", "last_s", "usage")

    def __init__(self, ticket: Ticket, body_bytes: int, metrics: Metrics, sizes: PromptSizes) -> None:
        self._ticket = ticket
        self._metrics = metrics
        self._sizes = sizes
        self._first_mark = self._last_mark = b""
        self.last_s = 0.0
        self.body_bytes = body_bytes
        self.events = 0
        self.answered = False
        self.usage: Usage | None = None

    def piece(self, data: bytes, now_s: float) -> None:
        """Whole events of a stream."""
        self.answered = True
        events = data.count(b"\n\n")
        if self.events and events:
            self._metrics.inter_token.observe((now_s - self.last_s) / events, events)
        self.last_s = now_s
        self.events += events
        if b'"usage"' in data or b'"meta_info"' in data:
            self._last_mark = data
            self._first_mark = self._first_mark or data

    def whole(self, data: bytes) -> None:
        """A complete answer that is no stream."""
        self._last_mark = data

    def complete(self) -> None:
        """The answer is complete: what did it cost?"""
        self.answered = True
        last = usage_in(self._last_mark) if self._last_mark else None
        first = last if self._first_mark is self._last_mark or not self._first_mark else usage_in(self._first_mark)
        usage = _merged(first, last)
        self._first_mark = self._last_mark = b""
        if usage is None:
            return
        self.usage = usage
        self._ticket.used_tokens = usage.prompt_tokens + usage.answer_tokens
        self._sizes.learn(self.body_bytes, usage.prompt_tokens)

    @property
    def answer_tokens(self) -> int:
        """As the engine said it, else by the events of the stream."""
        return self.usage.answer_tokens if self.usage is not None else max(0, self.events - _FRAME_EVENTS)

    @property
    def prompt_tokens(self) -> int:
        """As the engine said it, else estimated."""
        return self.usage.prompt_tokens if self.usage is not None else self._sizes.estimate(self.body_bytes)


def usage_in(data: bytes) -> Usage | None:
    """The last usage that stands in an answer, or in the last events of one."""
    for mark in _MARKS:
        at = data.rfind(mark)
        if at >= 0 and (found := _object_after(data[at + len(mark) : at + _USAGE_MAX_BYTES])) is not None:
            return _usage_of(found)
    return None


def _object_after(data: bytes) -> dict[str, Any] | None:
    text = data.decode("utf-8", "ignore").lstrip(" :\t")
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _usage_of(found: dict[str, Any]) -> Usage | None:
    prompt = _count(found, "prompt_tokens", "input_tokens")
    prompt += _count(found, "cache_read_input_tokens") + _count(found, "cache_creation_input_tokens")  # Anthropic counts them apart
    answer = _count(found, "completion_tokens", "output_tokens")
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = _count(details if isinstance(details, dict) else found, "cached_tokens", "cache_read_input_tokens")
    return Usage(prompt, answer, cached) if prompt or answer else None


def _count(found: dict[str, Any], *names: str) -> int:
    for name in names:
        value = found.get(name)
        if type(value) is int and value >= 0:
            return value
    return 0


def _merged(first: Usage | None, last: Usage | None) -> Usage | None:
    """Anthropic's streams say the prompt's tokens in their first event and the answer's in their last."""
    if first is None or last is None:
        return last or first
    return Usage(
        max(first.prompt_tokens, last.prompt_tokens),
        max(first.answer_tokens, last.answer_tokens),
        max(first.cached_tokens, last.cached_tokens),
    )
