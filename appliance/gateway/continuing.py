"""A stream gone on with as a message that has begun, for engines that can finish one (vLLM, SGLang, llama.cpp: `continue_final_message`).

The next engine is given the request and, as the beginning of the assistant's message, the text that the client has; what
comes goes on under the first run's id. It is not exact to the token, as the text is cut into tokens anew, and needs neither
a seed nor temperature 0. Only for plain text: a tool call, a grammar or log probabilities do not go on from the middle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from appliance.gateway.said import Said, document_in, once_of, texts_of

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
_LIMITS = (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0))
"""Of the whole answer: less by what the client has, and what they may not fall below."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the next engine is asked, and what of its answer is known.

    Attributes:
        seam: white space at the end of the text that was sent. Templates cut it off, so the engine may say it again.
        tokens: of the text that was sent, as far as events tell.
    """

    body: bytes
    frame: Json
    seam: str
    tokens: int


def going_on(path: str, body: bytes, said: Said) -> Request | None:
    """The request that goes on behind what was said; None where there is no such request."""
    beginning = said.beginning()
    text = beginning.text.rstrip() if beginning is not None else ""
    if beginning is None or not text:
        return None
    document = json.loads(body)
    asked = _message(document, text) if path == CHAT else _prompt(document, text)
    if asked is None:
        return None
    limits = {name: max(least, document[name] - beginning.tokens) for name, least in _LIMITS if isinstance(document.get(name), int)}
    whole = json.dumps({**document, **asked, **limits}, separators=(",", ":")).encode()
    return Request(whole, beginning.frame, beginning.text[len(text) :], beginning.tokens)


def _message(document: Json, text: str) -> Json | None:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    *earlier, last = messages
    if document.get("continue_final_message") is True:
        if not isinstance(last, dict) or not isinstance(last.get("content"), str):
            return None
        messages = [*earlier, {**last, "content": last["content"] + text}]
    else:
        messages = [*messages, {"role": "assistant", "content": text}]
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def _prompt(document: Json, text: str) -> Json | None:
    prompt = document.get("prompt")
    return {"prompt": prompt + text} if isinstance(prompt, str) else None


class Rest:
    """The next engine's events as the rest of the first one's. Everything it lets through is added to what has been said."""

    __slots__ = ("_frame", "_said", "_seam", "_tokens")

    def __init__(self, said: Said, request: Request) -> None:
        self._said = said
        self._frame = request.frame
        self._seam = request.seam
        self._tokens = request.tokens

    def take(self, events: bytes) -> bytes:
        """Whole events."""
        passed = b"".join(self._rest(events))
        return self._said.take(passed) if passed else b""

    def _rest(self, events: bytes) -> Iterator[bytes]:
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            document = document_in(event)
            if document is None:
                if event.strip() and not event.startswith(b":"):
                    yield event + b"\n\n"
            elif "error" in document:
                yield event + b"\n\n"
            elif self._fits(document):
                document |= {name: value for name, value in self._frame.items() if name in document}
                yield b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"

    def _fits(self, document: Json) -> bool:
        """Take out what the client has; whether anything is left."""
        new = False
        for _, holder, name in texts_of(document):
            holder[name] = self._behind_seam(holder[name])
            new = new or bool(holder[name])
        for key, holder, name in list(once_of(document)):
            if key[0] == "role":
                del holder[name]
            elif key[0] == "usage":
                self._add_up(holder[name])
                new = new or key[1] == "last"
            else:
                new = True
        return new

    def _behind_seam(self, text: str) -> str:
        if not self._seam or not text:
            return text
        same = next((at for at, (ours, theirs) in enumerate(zip(self._seam, text, strict=False)) if ours != theirs), None)
        count = min(len(self._seam), len(text)) if same is None else same
        self._seam = self._seam[count:] if count == len(text) else ""
        return text[count:]

    def _add_up(self, usage: Json) -> None:
        """What was a part of the answer has come back as a part of the prompt."""
        for name, more in (("prompt_tokens", -self._tokens), ("completion_tokens", self._tokens)):
            if isinstance(usage.get(name), int):
                usage[name] = max(0, usage[name] + more)
