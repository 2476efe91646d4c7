"""OpenAI's `usage`: of an answer, and of a stream's chunks as `stream_options` asks for it."""

from __future__ import annotations

import enum

from appliance.engine.api.exchange import Json
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Ending, Piece


class Tells(enum.Enum):
    """When a stream tells it."""

    NEVER = "never"
    AT_END = "in a chunk of its own behind the last one"
    ALWAYS = "so far in every chunk, and at the end"


def read_tells(fields: Fields) -> Tells:
    """`stream_options`: `include_usage`, and vLLM's `continuous_usage_stats`, which guidellm sends and which does nothing alone."""
    options = fields.nested("stream_options")
    at_end, always = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.end()
    if not at_end:
        return Tells.NEVER
    return Tells.ALWAYS if always else Tells.AT_END


def usage(ending: Ending) -> Json:
    """OpenAI's object. The token that ended the answer is not counted: it is no part of it."""
    counts = _counts(ending.prompt_tokens, ending.completion_tokens)
    return {**counts, "prompt_tokens_details": {"cached_tokens": ending.cached_tokens}}


class StreamUsage:
    """What the chunks of one stream say of it."""

    def __init__(self, tells: Tells, prompt_tokens: int) -> None:
        self._tells = tells
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def add(self, piece: Piece) -> None:
        """Its tokens count from now on."""
        self._completion_tokens += len(piece.token_ids)

    def of_chunk(self) -> Json:
        """The field of a chunk with choices, where it has one."""
        if self._tells is Tells.NEVER:
            return {}
        return {"usage": None if self._tells is Tells.AT_END else _counts(self._prompt_tokens, self._completion_tokens)}

    def at_end(self, ending: Ending) -> Json:
        """The fields of the chunk behind the last one; empty: there is none."""
        return {} if self._tells is Tells.NEVER else {"choices": [], "usage": usage(ending)}


def _counts(prompt_tokens: int, completion_tokens: int) -> Json:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}
