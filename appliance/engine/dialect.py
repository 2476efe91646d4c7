"""How a family of models writes the calls of tools, read from its own chat template.

    HERMES            <tool_call>{"name": ..., "arguments": {...}}</tool_call>       Qwen 2.5 and 3, Hermes, and those who follow them
    LLAMA             {"name": ..., "parameters": {...}}, bare or behind <|python_tag|>                                  Llama 3.1 to 3.3
    MISTRAL_LIST      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]                     Mistral 7B v0.3, Nemo, Small 3.0 and 3.1
    MISTRAL_NAMED     [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}                                        Ministral 3, Devstral
    MISTRAL_NUMBERED  [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}                                                        Mistral Small 3.2

No torch, and nothing of HTTP.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

_LLAMA_FORM = re.compile(r'\{"name":[^{}]{0,60}"parameters":')
"""As the prompt of Llama 3 tells the model: Respond in the format {"name": function name, "parameters": dictionary of ...}."""
_OTHER_FORMS = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")
"""Between Hermes' tags, or in tags like them: Qwen3-Coder, GLM, MiniMax, Apriel and their kin."""
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


class Dialect(enum.Enum):
    """See above. The value is what a refusal or a log calls it."""

    HERMES = "<tool_call> of Qwen and Hermes"
    LLAMA = "JSON of Llama 3"
    MISTRAL_LIST = "[TOOL_CALLS] list of Mistral"
    MISTRAL_NAMED = "[TOOL_CALLS]name[ARGS] of Mistral"
    MISTRAL_NUMBERED = "[TOOL_CALLS]name[CALL_ID]id[ARGS] of Mistral"

    @property
    def marks(self) -> tuple[str, ...]:
        """What is a special token in most vocabularies of the family, and has to be seen where calls are read."""
        if self is Dialect.HERMES:
            return TOOL_CALL, TOOL_CALL_END
        return (PYTHON_TAG,) if self is Dialect.LLAMA else (TOOL_CALLS, CALL_ID, ARGS)


def dialect_of(template: str) -> Dialect | None:
    """By the source of the model's chat template; None: it tells of no tools, or in a form that is not known here."""
    if "tools" not in template:
        return None
    if TOOL_CALLS in template:
        if ARGS not in template:
            return Dialect.MISTRAL_LIST
        return Dialect.MISTRAL_NUMBERED if CALL_ID in template else Dialect.MISTRAL_NAMED
    if TOOL_CALL in template:
        return None if any(form in template for form in _OTHER_FORMS) else Dialect.HERMES
    return Dialect.LLAMA if _LLAMA_FORM.search(template) else None


def fitting_ids(messages: Sequence[Mapping[str, object]], dialect: Dialect | None) -> Sequence[Mapping[str, object]]:
    """The conversation with ids of calls as the template takes them: Mistral's raise for any but nine letters and digits, and clients
    bring those of whoever made the call. The same id becomes the same one everywhere."""
    if dialect is None or TOOL_CALLS not in dialect.marks:
        return messages
    return [_with_fitting_ids(message) for message in messages]


def _with_fitting_ids(message: Mapping[str, object]) -> Mapping[str, object]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _nine(str(message["tool_call_id"]))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [{**call, "id": _nine(str(call.get("id", index)))} for index, call in enumerate(calls)]
    return changed


def _nine(call_id: str) -> str:
    return call_id if _MISTRAL_ID.fullmatch(call_id) else hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]
