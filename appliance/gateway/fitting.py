"""Prompts made shorter, or a little longer, so that their length goes ([admission] length_policy). Pure: the engine counts.

Shorter: a conversation loses its oldest messages, up to a later one of the user's; what the system says and the last
message stay. A text loses its beginning. Longer, for a length at which the engine crashes: a line break or some in front of a
text, or inside the last message in front of its last word (templates cut white space off at both of its ends). They stand
in front of the space: a word keeps its own to itself in every tokenizer, so that a break is one token more and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
Make = Callable[[], Json]
CUTS = 32
"""Places at which a text may be cut off, besides which there is a search for the best one."""
BREAKS_MAX = 4
BREAKS_APART_MAX = 16
"""A prompt that would need more tokens than this to get to a bucket is not padded: that many line breaks are another question."""
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


def longer(path: str, document: Json, most_tokens: int = 0) -> Iterator[Json]:
    """The prompt with more and more line breaks: first in one place, then one each in up to so many places."""
    found = _padded_text(path, document)
    if found is None:
        return
    text, at_end, put = found
    for breaks in range(1, BREAKS_MAX + 1):
        yield put(_in_one_place(text, breaks, at_end))
    for breaks in range(2, min(most_tokens, BREAKS_APART_MAX) + 1):
        if text.count(" ") > breaks:
            yield put(_apart(text, breaks, at_end))


def _padded_text(path: str, document: Json) -> tuple[str, bool, Callable[[str], Json]] | None:
    """The text that line breaks can go into, whether that is at its end, and the document with another one in its place."""
    if path not in _CONVERSATIONS:
        name = next((name for name in _TEXTS.get(path, ()) if isinstance(document.get(name), str)), None)
        return None if name is None else (document[name], False, lambda text: {**document, name: text})
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return None
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.rstrip().rpartition(" ")[0].strip():
        return None
    return content.rstrip(), True, lambda text: {**document, "messages": [*messages[:-1], {**messages[-1], "content": text}]}


def _in_one_place(text: str, breaks: int, at_end: bool) -> str:
    if not at_end:
        return "\n" * breaks + text
    head, space, word = text.rpartition(" ")
    return head + "\n" * breaks + space + word


def _apart(text: str, breaks: int, at_end: bool) -> str:
    """In front of the last words, or of the first ones: breaks that stand together would become one token."""
    if at_end:
        return "\n ".join(text.rsplit(" ", breaks))
    return "\n" + "\n ".join(text.split(" ", breaks - 1))


def _fewer_messages(document: Json) -> list[Make]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    head = next((at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at].get("role") == "user"]
    return [lambda start=start: {**document, "messages": [*messages[:head], *messages[start:]]} for start in starts]  # type: ignore[misc]
