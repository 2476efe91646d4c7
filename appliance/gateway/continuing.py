"""A stream gone on with as a message that has begun, for engines that can finish one (vLLM, SGLang, llama.cpp: `continue_final_message`).

The next engine is given the request and, as the beginning of the assistant's message, the text that the client has; what
comes goes on under the first run's id. It is not exact to the token, as the text is cut into tokens anew, and needs neither
a seed nor temperature 0. Only for plain text: a tool call, a grammar or log probabilities do not go on from the middle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from appliance.gateway.said import MESSAGES, Beginning, Key, Said, document_in, once_of, texts_of

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FINISH = ("finish", 0)
_LIMITS = {"max_tokens": 1, "max_completion_tokens": 1, "n_predict": 1, "min_tokens": 0}
"""Of the whole answer: less by what the client has, and what they may not fall below."""
_ANTHROPIC = {
    "model": "model",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What the next engine is asked, and what of its answer is known.

    Attributes:
        seam: white space at the end of the text that was sent. Templates cut it off, so the engine may say it again.
        tokens: of the text that was sent, as far as events tell, without those of the seam.
        all_tokens: with them, where the text is complete: only its end is missing, and what the engine says is not for the client.
        once, prompt_tokens, told: see Beginning.
    """

    body: bytes
    frame: Json
    seam: str
    tokens: int
    all_tokens: int | None
    once: frozenset[Key]
    prompt_tokens: int | None
    told: bool


def going_on(path: str, body: bytes, said: Said) -> Request | None:
    """The request that goes on behind what was said (the first one, where that was nothing but a seam); None where there is none."""
    beginning = said.beginning()
    if beginning is None:
        return None
    document, text = _as_asked(path, json.loads(body)), beginning.text.rstrip()
    behind = _prompt if path == TEXT else _message
    if document is None or (asked := behind(document, text) if text else {}) is None:
        return None
    limits, complete = _limits(document, beginning)
    whole = json.dumps({**document, **asked, **limits}, separators=(",", ":")).encode()
    return Request(
        body=whole,
        frame=beginning.frame,
        seam=beginning.text[len(text) :],
        tokens=beginning.tokens - beginning.blank,
        all_tokens=beginning.tokens if complete else None,
        once=beginning.once,
        prompt_tokens=beginning.prompt_tokens,
        told=beginning.told,
    )


def _limits(document: Json, beginning: Beginning) -> tuple[Json, bool]:
    """What is left of them, and whether the text is complete: it has said why it ended, or has as many tokens as it may have."""
    asked = {name: document[name] for name in _LIMITS if isinstance(document.get(name), int) and document[name] > 0}
    most = min((limit for name, limit in asked.items() if _LIMITS[name]), default=math.inf)
    if FINISH in beginning.once or beginning.tokens >= most:
        return {"max_tokens": 1, **dict.fromkeys(asked, 1)}, True
    tokens = beginning.tokens - beginning.blank
    return {name: max(_LIMITS[name], limit - tokens) for name, limit in asked.items()}, False


def _as_asked(path: str, document: Json) -> Json | None:
    """The request in OpenAI's words. Anthropic's is asked as a chat where it is text alone and its answer was not begun by the client."""
    if path != MESSAGES:
        return document
    messages = document.get("messages")
    system, said = _text_of(document.get("system", "")), messages if isinstance(messages, list) else []
    turns = [(one.get("role"), _text_of(one.get("content"))) for one in said if isinstance(one, dict)]
    if system is None or not turns or turns[-1][0] != "user" or any(text is None for _, text in turns):
        return None
    asked = {ours: document[theirs] for theirs, ours in _ANTHROPIC.items() if document.get(theirs) is not None}
    first = [{"role": "system", "content": system}] if system else []
    asked["messages"] = first + [{"role": role, "content": text} for role, text in turns]
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


def _text_of(content: object) -> str | None:
    """Of a text or a list of texts; None where it is more."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "\n".join(texts)


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


class Onward(Protocol):
    """What the next engine is asked, and what becomes of its events."""

    @property
    def body(self) -> bytes:
        """Of the request."""

    def take(self, events: bytes) -> bytes:
        """Whole events of that engine's; what of them is for the client."""


class Rest:
    """The next engine's events as the rest of the first one's. Everything it lets through is added to what has been said."""

    __slots__ = ("_said", "_seam", "request")

    def __init__(self, said: Said, request: Request) -> None:
        self.request = request
        self._said = said
        self._seam = request.seam

    @property
    def body(self) -> bytes:
        """See Request."""
        return self.request.body

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
                document |= {name: value for name, value in self.request.frame.items() if name in document}
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
                new = new or (key[1] == "last" and key not in self.request.once)
            elif key == FINISH and self.request.all_tokens is not None:
                holder[name] = None if key in self.request.once else "length"
                new = new or holder[name] is not None
            else:
                new = True
        return new

    def _behind_seam(self, text: str) -> str:
        if self.request.all_tokens is not None:
            return ""
        if not self._seam or not text:
            return text
        same = next((at for at, (ours, theirs) in enumerate(zip(self._seam, text, strict=False)) if ours != theirs), None)
        count = min(len(self._seam), len(text)) if same is None else same
        self._seam = self._seam[count:] if count == len(text) else ""
        return text[count:]

    def _add_up(self, usage: Json) -> None:
        """What was a part of the answer has come back as a part of the prompt."""
        had, prompt, answer = self.request, usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(answer, int):
            return
        kept = had.tokens if had.told or had.prompt_tokens is None else max(0, prompt - had.prompt_tokens)
        seam = 0 if had.all_tokens is None else had.all_tokens - had.tokens
        usage["prompt_tokens"] = max(0, prompt - kept) if had.prompt_tokens is None else had.prompt_tokens
        usage["completion_tokens"] = kept + (answer if had.all_tokens is None else seam)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
