"""Log probabilities in OpenAI's two forms: of the model before anything was adjusted, with its likeliest tokens."""

from __future__ import annotations

from typing import Any

from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Piece
from appliance.engine.api.parameters import MOST_LOGPROBS
from appliance.engine.text import ModelText

Json = dict[str, Any]


def read_chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` and `top_logprobs`: how many of the likeliest; None: nothing was asked for."""
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top and not wanted:
        raise bad_request(f"top_logprobs={top} needs logprobs=true", "top_logprobs", "invalid_value")
    return top or 0 if wanted else None


def read_completion_logprobs(fields: Fields) -> int | None:
    """`logprobs`, a number."""
    return fields.integer("logprobs", 0, MOST_LOGPROBS)


class ChatLogprobs:
    """`choices[].logprobs` of a chat."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def of(self, piece: Piece) -> Json | None:
        """An entry a token."""
        if not piece.likelihoods:
            return None
        content = []
        for token_id, likelihood in zip(piece.token_ids, piece.likelihoods, strict=True):
            top = [self._entry(other, logprob) for other, logprob in likelihood.top]
            content.append({**self._entry(token_id, likelihood.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        token, raw = self._text.token(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion; its offsets go on from piece to piece."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._offset = 0

    def of(self, piece: Piece) -> Json | None:
        """Four lists, an entry a token."""
        if not piece.likelihoods:  # said in an earlier engine life, or not asked for
            self._offset += sum(len(self._text.token(token_id)[0]) for token_id in piece.token_ids)
            return None
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, likelihood in zip(piece.token_ids, piece.likelihoods, strict=True):
            token, _ = self._text.token(token_id)
            lists["tokens"].append(token)
            lists["token_logprobs"].append(likelihood.logprob)
            lists["top_logprobs"].append({self._text.token(other)[0]: logprob for other, logprob in likelihood.top})
            lists["text_offset"].append(self._offset)
            self._offset += len(token)
        return lists
