"""Prompts made shorter, or a little longer, so that their length goes ([admission] length_policy). Pure: the engine counts.

Shorter: a conversation loses its oldest messages, up to a later one of the user's; what the system says and the last
message stay. A text loses its beginning. Longer, for a length at which the engine crashes: a line break or some in front of a
text, or inside the last message in front of its last word (templates cut white space off at both of its ends).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
Make = Callable[[], Json]
CUTS = 32
"""Places at which a text may be cut off, besides which there is a search for the best one."""
BREAKS_MAX = 4
_CONVERSATIONS = ("/v1/chat/completions", "/v1/messages")
_TEXTS = {"/v1/completions": ("prompt",), "/generate": ("text", "input_ids")}
_SYSTEM = ("system", "developer")


def shorter(path: str, document: Json) -> list[Make]:
    """Ways to a shorter prompt, from the one that takes least to the one that takes most."""
    if path in _CONVERSATIONS:
        return _fewer_messages(document)
    name = next((name for name in _TEXTS.get(path, ()) if isinstance(document.get(name), str | list)), None)
    if name is None:
        return []
    text = document[name]
    if isinstance(text, list) and not all(type(item) is int for item in text):
        return []
    starts = sorted({len(text) * cut // CUTS for cut in range(1, CUTS)} - {0})
    return [lambda start=start: {**document, name: text[start:]} for start in starts]  # type: ignore[misc]


def longer(path: str, document: Json) -> Iterator[Json]:
    """The prompt with one line break more each time."""
    for breaks in range(1, BREAKS_MAX + 1):
        if path in _CONVERSATIONS:
            messages = document.get("messages")
            if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
                return
            content = messages[-1].get("content")
            if not isinstance(content, str):
                return
            head, space, word = content.rstrip().rpartition(" ")
            if not head.strip():
                return
            yield {**document, "messages": [*messages[:-1], {**messages[-1], "content": head + space + "\n" * breaks + word}]}
        else:
            name = next((name for name in _TEXTS.get(path, ()) if isinstance(document.get(name), str)), None)
            if name is None:
                return
            yield {**document, name: "\n" * breaks + document[name]}


def _fewer_messages(document: Json) -> list[Make]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    head = next((at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at].get("role") == "user"]
    return [lambda start=start: {**document, "messages": [*messages[:head], *messages[start:]]} for start in starts]  # type: ignore[misc]
