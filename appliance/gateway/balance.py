"""Which of several engines a request goes to. Pure.

Each conversation has a home: of the engines that answer, the one with the highest hash of engine and conversation
(rendezvous hashing: Thaler, Ravishankar 1998). What it said so far lies in the prefix cache there. When an engine goes out,
its conversations find new homes and all others keep theirs; when it is back, so are they.

A home that is busier than the least busy engine by more than MARGIN is left (consistent hashing with bounded loads:
Mirrokni, Thorup, Zadimoghaddam 2016): what a prefix saves is less than what a full engine costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

MARGIN = 0.25
"""Of an engine's slots, or of its KV pool."""
BEGINNING_CHARACTERS = 1024
"""So much of a text tells it from others; of a shorter one, all of it."""
MESSAGES_MAX = 8
"""Of those at the beginning, before the first that is not the system's."""
_SYSTEM = ("system", "developer")
_TEXTS = ("prompt", "text", "input_ids", "input")


@dataclass(frozen=True, slots=True)
class Load:
    """One engine that answers.

    Attributes:
        busy: how much of it is taken, from 0 to 1: of its slots or its KV pool, whichever is more.
        free: it could take the request that is asked about now.
    """

    replica: int
    busy: float
    free: bool


def choose(conversation: int, order: int, loads: Sequence[Load]) -> int | None:
    """The engine for a request; None: none is free for it now.

    Args:
        conversation: key_of its body; 0: it has no beginning that others share.
        order: of arrival. It spreads what else would all go to the first of equals.
    """
    free = [load for load in loads if load.free]
    if not free:
        return None
    scores = {load.replica: _score(conversation or order, load.replica) for load in loads}
    least = min(free, key=lambda load: (load.busy, scores[load.replica]))
    if conversation:
        home = max(loads, key=lambda load: scores[load.replica])
        if home.free and home.busy - least.busy <= MARGIN:
            return home.replica
    return least.replica


def key_of(document: Mapping[str, Any]) -> int:
    """What stays the same of a conversation's bodies as it grows, as a number; 0: it is no conversation and no text.

    Its model, what the system says, and the first message after that; of a text, its beginning.
    """
    messages = document.get("messages")
    if isinstance(messages, list):
        return _key(document, _first_messages(messages))
    for name in _TEXTS:
        text = document.get(name)
        if isinstance(text, list) and text and isinstance(text[0], dict):
            return _key(document, _first_messages(text))
        if isinstance(text, str | list) and text:
            return _key(document, [_beginning(text)])
    return 0


def _first_messages(messages: list[Any]) -> list[str]:
    told: list[str] = []
    for message in messages[:MESSAGES_MAX]:
        if not isinstance(message, dict):
            break
        told.append(_beginning(message.get("content")))
        if message.get("role") not in _SYSTEM:
            break
    return told


def _key(document: Mapping[str, Any], told: list[str]) -> int:
    system = document.get("system") or document.get("instructions")  # Anthropic's and OpenAI's newer APIs have it beside the messages
    parts = _beginning(document.get("model")), _beginning(system), *told
    return _hash("\0".join(parts).encode("utf-8", "replace")) or 1


def _beginning(content: object) -> str:
    """Of a text, of the texts in a message's parts, or of token ids."""
    if isinstance(content, str):
        return content[:BEGINNING_CHARACTERS]
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") if isinstance(part, dict) else part for part in content[:BEGINNING_CHARACTERS])
    return "\1".join(text if isinstance(text, str) else str(text) for text in texts if isinstance(text, str | int))[:BEGINNING_CHARACTERS]


def _score(key: int, replica: int) -> int:
    return _hash(b"%d %d" % (key, replica))


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
