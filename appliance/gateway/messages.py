"""A stream of /v1/messages gone on with over an engine's death, for engines that finish a message that has begun.

They do that on /v1/chat/completions. So the rest is asked for there, of a request that is text alone, and told in Anthropic's events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from appliance.gateway.continuing import FINISH, Rest
from appliance.gateway.said import document_in
from appliance.gateway.sse import named_event

Json = dict[str, Any]
_STOPPED = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageRest:
    """The next engine's chat completion as the rest of a message: its end, which is told once, when all is known of it."""

    __slots__ = ("_closed", "_ended", "_rest", "_stopped", "_usage")

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._closed = ("closed", 0) in rest.request.once
        self._ended = FINISH in rest.request.once
        self._stopped: Json = {"stop_reason": "end_turn", "stop_sequence": None}
        self._usage: Json = {}

    @property
    def body(self) -> bytes:
        """For chat completions."""
        return self._rest.body

    def take(self, events: bytes) -> bytes:
        """Whole events."""
        return b"".join(self._told(self._rest.take(events)))

    def _told(self, events: bytes) -> Iterator[bytes]:
        for event in events.split(b"\n\n"):
            document = document_in(event)
            if document is None:
                if event:
                    yield from self._end()
            elif "error" in document:
                yield named_event("error", {"type": "error", "error": document["error"]})
            else:
                self._usage = document.get("usage") or self._usage
                for choice in document.get("choices") or ():
                    yield from self._grown(choice)

    def _grown(self, choice: Json) -> Iterator[bytes]:
        if text := choice["delta"].get("content"):
            yield named_event(
                "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            )
        if reason := choice.get("finish_reason"):
            found = choice.get("stop_reason") or choice.get("matched_stop")  # vLLM's word and SGLang's for the sequence that was met
            met = found if isinstance(found, str) else None
            self._stopped = {"stop_reason": "stop_sequence" if met else _STOPPED.get(reason, "end_turn"), "stop_sequence": met}

    def _end(self) -> Iterator[bytes]:
        if not self._closed:
            yield named_event("content_block_stop", {"type": "content_block_stop", "index": 0})
        if not self._ended:
            usage = {"input_tokens": self._usage.get("prompt_tokens", 0), "output_tokens": self._usage.get("completion_tokens", 0)}
            yield named_event("message_delta", {"type": "message_delta", "delta": self._stopped, "usage": usage})
        yield named_event("message_stop", {"type": "message_stop"})
