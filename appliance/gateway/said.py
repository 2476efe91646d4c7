"""What a stream has said to its client, and a second run of the same request measured against it.

For engines that cannot go on behind a point: a deterministic request is answered again from its start; what the client
has already is compared and swallowed, the rest goes on under the first run's id. Where the second run says something
else, the stream ends with an error that says so. Texts are compared field by field (content, reasoning, tool calls'
arguments, log probabilities, each choice of n), because two runs may cut their text into events differently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from appliance.gateway.envelope import Refused

FOLD_BYTES = 256 * 1024
"""Events are kept as they are up to this; then the oldest are folded into their texts. Most streams are never parsed."""
FOLD_AT_ONCE_BYTES = 8 * 1024
"""Some forty events, half a millisecond: everybody else's tokens wait for that."""
TEXTS_MAX_CHARS = 4_000_000
_IDENTITY = ("id", "created", "model", "system_fingerprint")
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_BLOCK_TEXTS = {"text": "content", "thinking": "thinking", "partial_json": "arguments"}
"""Of Anthropic's blocks, and what they are called here."""
PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Whose streams can be compared."""
MESSAGES = "/v1/messages"
"""Whose streams can be read as well."""
Json = dict[str, Any]
Key = tuple[object, ...]
_PLAIN: tuple[Key, ...] = (("content", 0), ("text", 0))
_RUNNING_USAGE: Key = ("usage", None)
"""With each event, where the client has asked for that (`continuous_usage_stats`)."""
_FIRST_USAGE: Key = ("usage", "first")
"""Anthropic's streams tell the prompt's tokens in their first event."""


class Diverged(Refused):
    """The second run is another answer."""

    def __init__(self, why: str) -> None:
        hint = "send the request again; the engine's answers to it depend on what else it computes"
        super().__init__(503, "answer_diverged", f"the engine was lost, and its next life answered differently: {why}", hint=hint)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A plain text that has begun, and is not complete with all that belongs to it.

    Attributes:
        frame: the identity under which it began.
        tokens: as the engine has told with its events (then `told`), else events that had text, which is about as many.
        blank: of these, those at the end that had nothing but white space.
        once: what has been said of what is said once: why it ended, perhaps its usage.
        prompt_tokens: where the engine has told, with its events or the first of them.
    """

    frame: Json
    text: str
    tokens: int
    blank: int
    once: frozenset[Key]
    prompt_tokens: int | None
    told: bool


class Said:
    """One stream so far."""

    __slots__ = ("_blank", "_counts", "_frame", "_length", "_once", "_pieces", "_raw", "_texts")

    def __init__(self) -> None:
        self._raw = bytearray()
        self._frame: Json = {}
        self._texts: dict[Key, str] = {}
        self._counts: Counter[Key] = Counter()
        self._once: dict[Key, object] = {}
        self._length = self._pieces = self._blank = 0

    def take(self, events: bytes) -> bytes:
        """Whole events on their way to the client, unchanged."""
        self._raw += events
        if len(self._raw) > FOLD_BYTES:
            self._fold(self._raw.rfind(b"\n\n", 0, FOLD_AT_ONCE_BYTES) + 2)
        return events

    @property
    def overflow(self) -> str:
        """Why it cannot be compared any more; empty while it can."""
        return f"it is longer than {TEXTS_MAX_CHARS} characters" if self._length > TEXTS_MAX_CHARS else ""

    def beginning(self) -> Beginning | None:
        """Where it is one text and nothing else; None: it is more than that."""
        self._fold(len(self._raw))
        texts = {key: text for key, text in self._texts.items() if text}
        more = +self._counts or any(key[0] not in ("role", "finish", "closed", "usage") for key in self._once)
        if more or self.overflow or len(texts) != 1 or next(iter(texts)) not in _PLAIN:
            return None
        prompt, answer = self._told_tokens()
        return Beginning(
            frame=dict(self._frame),
            text=next(iter(texts.values())),
            tokens=self._pieces if answer is None else answer,
            blank=self._blank,
            once=frozenset(self._once),
            prompt_tokens=prompt,
            told=answer is not None,
        )

    def _told_tokens(self) -> tuple[int | None, int | None]:
        """Of prompt and answer so far, as far as the engine has told."""
        first, running = self._once.get(_FIRST_USAGE), self._once.get(_RUNNING_USAGE)
        if (
            isinstance(running, dict)
            and isinstance(running.get("prompt_tokens"), int)
            and isinstance(running.get("completion_tokens"), int)
        ):
            return running["prompt_tokens"], running["completion_tokens"]
        if isinstance(first, dict) and isinstance(first.get("input_tokens"), int):
            cached = (first.get("cache_read_input_tokens"), first.get("cache_creation_input_tokens"))
            return first["input_tokens"] + sum(count for count in cached if isinstance(count, int)), None
        return None, None

    def replay(self) -> Replay:
        """A second run, to be measured against this."""
        self._fold(len(self._raw))
        return Replay(self, dict(self._frame), dict(self._texts), self._counts.copy(), dict(self._once))

    def _fold(self, count: int) -> None:
        """The first so many bytes, whole events; all where the first event is longer than what is folded at once."""
        count = count if count > 1 else len(self._raw)
        events = bytes(self._raw[:count])
        del self._raw[:count]
        parts: dict[Key, list[str]] = {}
        for document in documents_of(events):
            self._frame = self._frame or {name: document[name] for name in _IDENTITY if name in document}
            for key, holder, name in texts_of(document):
                parts.setdefault(key, []).append(holder[name])
                self._count(holder[name])
            for key, holder, name in lists_of(document):
                self._counts[key] += len(holder[name])
            self._once |= {key: holder[name] for key, holder, name in once_of(document)}
        for key, texts in parts.items():
            text = "".join(texts)
            self._length += len(text)
            if not self.overflow:
                self._texts[key] = self._texts.get(key, "") + text

    def _count(self, text: str) -> None:
        if text:
            self._pieces += 1
            self._blank = self._blank + 1 if text.isspace() else 0


class Replay:
    """The second run's events, less what the client has. Everything it lets through is added to what has been said."""

    __slots__ = ("_counts", "_frame", "_left", "_once", "_said")

    def __init__(self, said: Said, frame: Json, left: dict[Key, str], counts: Counter[Key], once: dict[Key, object]) -> None:
        self._said = said
        self._frame = frame
        self._left = left
        self._counts = counts
        self._once = once

    def take(self, events: bytes) -> bytes:
        """Whole events. Raises Diverged."""
        passed = b"".join(self._rest(events))
        return self._said.take(passed) if passed else b""

    def _rest(self, events: bytes) -> Iterator[bytes]:
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            document = document_in(event)
            if document is None:
                if event.strip() and not event.startswith(b":"):
                    self._check_end("[DONE]")
                    yield event + b"\n\n"
            elif "error" in document:
                yield event + b"\n\n"
            elif self._cut(document):
                document |= {name: value for name, value in self._frame.items() if name in document}
                yield b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"

    def _cut(self, document: Json) -> bool:
        """Take out what the client has; whether anything is left."""
        new = False
        for key, holder, name in texts_of(document):
            self._swallow(key, holder, name)
            new = new or bool(holder[name])
        for key, holder, name in lists_of(document):
            values = holder[name]
            holder[name] = values[self._counts[key] :]
            self._counts[key] -= len(values) - len(holder[name])
            new = new or bool(holder[name])
        for key, holder, name in list(once_of(document)):
            new = self._once_only(key, holder, name) or new
        return new

    def _swallow(self, key: Key, holder: Json, name: str) -> None:
        left, text = self._left.get(key, ""), holder[name]
        count = min(len(left), len(text))
        if text[:count] != left[:count]:
            raise Diverged(f"where the first run had {_shown(left)}, the second one had {_shown(text)}")
        if count:
            self._left[key] = left[count:]
            holder[name] = text[count:]

    def _once_only(self, key: Key, holder: Json, name: str) -> bool:
        value = holder[name]
        if key not in self._once:
            if key[0] == "finish":
                self._check_end(f"finish_reason {value!r}", choice=key[1])
            self._once[key] = value
            return True
        if key[0] in ("finish", "name") and self._once[key] != value:
            raise Diverged(f"where the first run had {_shown(str(self._once[key]))}, the second one had {_shown(str(value))}")
        if key[0] == "finish":
            holder[name] = None
        elif key[0] != "usage":
            del holder[name]
        return False

    def _check_end(self, what: str, choice: object = None) -> None:
        missing = next((text for key, text in self._left.items() if text and choice in (None, key[1])), "")
        if missing:
            raise Diverged(f"the second run ended ({what}) before {_shown(missing)}, which the first one had said")


def why_incomparable(path: str, deterministic: bool) -> str:
    """Why a second run of a stream could not be measured against the first; empty where it could."""
    if path not in PATHS:
        return f"streams of {path} cannot be compared with a second run"
    return "" if deterministic else "a second run would say something else, as the request has neither temperature 0 nor a seed"


def documents_of(events: bytes) -> Iterator[Json]:
    """The JSON objects in whole events."""
    for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
        document = document_in(event)
        if document is not None:
            yield document


def document_in(event: bytes) -> Json | None:
    """An event's JSON object, if it has one."""
    data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def texts_of(document: Json) -> Iterator[tuple[Key, Json, str]]:
    """The texts that grow from event to event: what each is, and where it stands."""
    if document.get("type") == "content_block_delta" and isinstance(block := document.get("delta"), dict):
        for name, kind in _BLOCK_TEXTS.items():
            if isinstance(block.get(name), str):
                yield (kind, document.get("index", 0)), block, name
    for choice in _choices(document):
        index = choice.get("index", 0)
        if isinstance(choice.get("text"), str):
            yield ("text", index), choice, "text"
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for name in _TEXTS:
                if isinstance(delta.get(name), str):
                    yield (name, index), delta, name
            for place, call in _calls(delta):
                function = call.get("function")
                if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                    yield ("arguments", index, place), function, "arguments"


def once_of(document: Json) -> Iterator[tuple[Key, Json, str]]:
    """What is said once: the role, why it ended, a tool call's id and name, the usage."""
    yield from _once_of_message(document)
    if document.get("usage"):
        yield _RUNNING_USAGE if _choices(document) else ("usage", "last"), document, "usage"
    for choice in _choices(document):
        index, delta = choice.get("index", 0), choice.get("delta")
        if choice.get("finish_reason") is not None:
            yield ("finish", index), choice, "finish_reason"
        if not isinstance(delta, dict):
            continue
        if "role" in delta:
            yield ("role", index), delta, "role"
        for place, call in _calls(delta):
            function = call.get("function")
            for holder, name in ((call, "id"), (call, "type"), (function, "name")):
                if isinstance(holder, dict) and holder.get(name):
                    yield (name, index, place), holder, name


def _once_of_message(document: Json) -> Iterator[tuple[Key, Json, str]]:
    """Of Anthropic's events: the prompt's usage, blocks that are no text, the end of a block, why it all ended."""
    kind, index = document.get("type"), document.get("index", 0)
    block, delta, message = document.get("content_block"), document.get("delta"), document.get("message")
    if kind == "message_start" and isinstance(message, dict) and message.get("usage"):
        yield _FIRST_USAGE, message, "usage"
    elif kind == "content_block_start" and isinstance(block, dict) and block.get("type") != "text":
        yield ("block", index), block, "type"
    elif kind == "content_block_stop":
        yield ("closed", index), document, "type"
    elif kind == "message_delta" and isinstance(delta, dict) and delta.get("stop_reason") is not None:
        yield ("finish", 0), delta, "stop_reason"


def lists_of(document: Json) -> Iterator[tuple[Key, Json, str]]:
    """The lists that grow from event to event: log probabilities, an entry a token."""
    for choice in _choices(document):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            for name, values in logprobs.items():
                if isinstance(values, list):
                    yield ("logprobs", choice.get("index", 0), name), logprobs, name


def _choices(document: Json) -> list[Json]:
    choices = document.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _calls(delta: Json) -> Iterator[tuple[int, Json]]:
    calls = delta.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else []):
        if isinstance(call, dict):
            yield call.get("index", place), call


def _shown(text: str) -> str:
    return repr(text[:40])
