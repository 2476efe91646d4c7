"""/v1/completions: a text or token ids to go on from; answers in OpenAI's form."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.api.chat import IGNORED, read_stream, usage
from appliance.engine.api.constraints import read_constraint
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, OpenAiEvents, others_of
from appliance.engine.api.fields import Fields, check_text, check_token_ids
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.likelihood import CompletionLogprobs, read_completion_logprobs
from appliance.engine.api.parameters import MOST_ANSWERS, check_model, encode_prompt, fit, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.messages import GenerateRequest


def read_completion(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a completion request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id = check_model(fields, model)
    sampling = read_sampling(fields, model.text, "max_tokens", "max_completion_tokens", most_answers=MOST_ANSWERS)
    logprobs, constrain = read_completion_logprobs(fields), read_constraint(fields, model)
    stream, include_usage = read_stream(fields)
    for name, neutral in (("best_of", 1), ("echo", False), ("suffix", ""), ("store", False)):
        fields.only(name, neutral)
    fields.ignore(*IGNORED)
    prompt = fields.value("prompt")
    fields.end()
    prompt_ids = _encode(prompt, model)
    ticket = ticket or new_ticket("cmpl", sampling.seed)
    params = replace(fit(sampling, prompt_ids, model, "prompt"), logprobs=logprobs)
    request = GenerateRequest(ticket.request_id, prompt_ids, params, constraint=constrain())

    def shape(index: int) -> CompletionShape:
        return CompletionShape(ticket, model_id, include_usage, CompletionLogprobs(model.text), index)

    more = others_of(request, sampling.answers, ticket.seed, constrain)
    others = tuple((other, shape(index)) for index, other in enumerate(more, 1))
    return Job(ticket, request, sampling.stops, stream, shape(0), others)


def _encode(prompt: object, model: LoadedModel) -> tuple[int, ...]:
    """OpenAI's four forms: a text, a list of one text, token ids, a list of one list of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise bad_request(
                f"prompt holds {len(prompt)} prompts; send each as a request of its own, they run together",
                "prompt",
                "unsupported_parameter",
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode_prompt(check_text(prompt, "prompt"), model, "prompt", add_special_tokens=True)
    if isinstance(prompt, list) and prompt:
        return check_token_ids(prompt, "prompt", model.text.vocabulary)
    raise bad_request("prompt must be a text or a list of at least one token id", "prompt", "invalid_type")


class CompletionShape(OpenAiEvents):
    """`text_completion`, whole and in chunks."""

    def __init__(self, ticket: Ticket, model_id: str, include_usage: bool, logprobs: CompletionLogprobs, index: int = 0) -> None:
        created = int(ticket.created_s)
        self._frame: Json = {"id": ticket.request_id, "object": "text_completion", "created": created, "model": model_id}
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._index = index

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        choice = self._choice(piece.text, ending.finish.value, self._logprobs.of(piece))
        return {**self._frame, "choices": [choice], "usage": usage(ending)}

    def begin(self) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def piece(self, piece: Piece) -> list[Json]:
        """New text, if any is certain yet, and how likely its tokens were."""
        logprobs = self._logprobs.of(piece)
        return [self._chunk(self._choice(piece.text, None, logprobs))] if piece.text or logprobs else []

    def end(self, ending: Ending) -> list[Json]:
        """The finish reason, and the usage in a chunk without choices."""
        chunks = [self._chunk(self._choice("", ending.finish.value))]
        if self._include_usage:
            chunks.append({**self._frame, "choices": [], "usage": usage(ending)})
        return chunks

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._frame, "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _choice(self, text: str, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
