"""Log probabilities in OpenAI's two forms: of the model before anything was adjusted, with its likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Piece
from appliance.engine.api.parameters import MOST_LOGPROBS
from appliance.engine.detokenize import Detokenizer
from appliance.engine.messages import Likelihood
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


@dataclass(frozen=True, slots=True)
class GenerateLogprobs:
    """What SGLang's `meta_info` says of likelihoods.

    Attributes:
        top: of so many likeliest tokens too.
        start: of the prompt's tokens from this place on; None: of none.
        texts: each token's text stands beside it.
    """

    text: ModelText
    top: int = 0
    start: int | None = None
    texts: bool = False

    def of(self, piece: Piece, prompt_ids: Sequence[int]) -> Json:
        """`piece` is all so far. Null is how likely the first token was, and those that were told in an earlier engine life."""
        fields = self._fields("output", _judged(piece.token_ids, piece.likelihoods))
        if self.start is not None:
            fields |= self._fields("input", _judged(prompt_ids, piece.prompt_likelihoods)[self.start :])
        return fields

    def _fields(self, of_what: str, judged: Sequence[tuple[int, Likelihood | None]]) -> Json:
        entries = [self._entry(None if likelihood is None else likelihood.logprob, token_id) for token_id, likelihood in judged]
        fields: Json = {f"{of_what}_token_logprobs": entries}
        if self.top:
            fields[f"{of_what}_top_logprobs"] = [None if likelihood is None else self._top(likelihood) for _, likelihood in judged]
        return fields

    def _top(self, likelihood: Likelihood) -> list[list[object]]:
        return [self._entry(logprob, token_id) for token_id, logprob in likelihood.top]

    def _entry(self, logprob: float | None, token_id: int) -> list[object]:
        return [logprob, token_id, self.text.token(token_id)[0] if self.texts else None]


def _judged(token_ids: Sequence[int], likelihoods: Sequence[Likelihood]) -> list[tuple[int, Likelihood | None]]:
    unknown = [None] * (len(token_ids) - len(likelihoods))
    return list(zip(token_ids, [*unknown, *likelihoods], strict=True))


def read_generate_logprobs(fields: Fields, text: ModelText) -> GenerateLogprobs | None:
    """`return_logprob`, `top_logprobs_num`, `logprob_start_len` and `return_text_in_logprobs`; None: nothing was asked for."""
    wanted, texts = fields.flag("return_logprob"), fields.flag("return_text_in_logprobs")
    top, start = fields.integer("top_logprobs_num", 0, MOST_LOGPROBS) or 0, fields.integer("logprob_start_len", -1, 2**31 - 1)
    start = None if start == -1 else start
    for name, value in (("top_logprobs_num", top or None), ("logprob_start_len", start)):
        if value is not None and not wanted:
            raise bad_request(f"{name}={value} needs return_logprob=true", name, "invalid_value")
    return GenerateLogprobs(text, top, start, texts) if wanted else None


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
    """`choices[].logprobs` of a completion. Its offsets are places in the choice's text, which begins with an echoed prompt."""

    def __init__(self, text: ModelText, wanted: bool, prompt_ids: Sequence[int], echo: bool) -> None:
        self._text = text
        self._wanted = wanted
        self._echoed = tuple(prompt_ids) if echo else ()
        self._places = _Places(text.detokenizer(() if echo else prompt_ids))
        for token_id in self._echoed:
            self._places.next(token_id)

    def of(self, piece: Piece, begins: bool = False) -> Json | None:
        """Four lists, an entry a token; where the choice begins, those of an echoed prompt first, whose first token has no likelihood."""
        places = [self._places.next(token_id) for token_id in piece.token_ids]
        if not self._wanted:
            return None
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if begins and self._echoed:
            in_prompt = _Places(self._text.detokenizer(()))
            for token_id, likelihood in zip(self._echoed, (None, *piece.prompt_likelihoods), strict=True):
                self._add(lists, token_id, likelihood, in_prompt.next(token_id))
        if piece.likelihoods:  # else they were said in an earlier engine life
            for token_id, likelihood, place in zip(piece.token_ids, piece.likelihoods, places, strict=True):
                self._add(lists, token_id, likelihood, place)
        return lists if lists["tokens"] else None

    def _add(self, lists: Json, token_id: int, likelihood: Likelihood | None, place: int) -> None:
        lists["tokens"].append(self._name(token_id))
        lists["token_logprobs"].append(None if likelihood is None else likelihood.logprob)
        lists["top_logprobs"].append(None if likelihood is None else self._top(likelihood))
        lists["text_offset"].append(place)

    def _top(self, likelihood: Likelihood) -> dict[str, float]:
        """Of several tokens with one name, the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in likelihood.top:
            top.setdefault(self._name(token_id), logprob)
        return top

    def _name(self, token_id: int) -> str:
        """Part of a character is told apart from another part as OpenAI does it: bytes:\\xe2\\x80."""
        name, raw = self._text.token(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return name


class _Places:
    """Where in a text its tokens begin; one in the middle of a character begins where that does."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._at = 0

    def next(self, token_id: int) -> int:
        """Of the token that comes now."""
        at = self._at
        self._at += len(self._detokenizer.feed((token_id,)))
        return at
