"""/v1/completions: a text or token ids to go on from; answers in OpenAI's form."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.api.chat import IGNORED, read_stream
from appliance.engine.api.constraints import read_constraint
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, OpenAiEvents, others_of
from appliance.engine.api.fields import Fields, check_text, check_token_ids
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.likelihood import CompletionLogprobs, read_completion_logprobs
from appliance.engine.api.parameters import MOST_ANSWERS, MOST_CHOICES, check_model, encode_prompt, fit, read_priority, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.api.usage import StreamUsage, usage
from appliance.engine.messages import GenerateRequest


def read_completion(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a completion request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id = check_model(fields, model)
    sampling = read_sampling(fields, model.text, "max_tokens", "max_completion_tokens", most_answers=MOST_ANSWERS)
    logprobs, constrain = read_completion_logprobs(fields), read_constraint(fields, model)
    stream, tells = read_stream(fields)
    priority = read_priority(fields)
    for name, neutral in (("best_of", 1), ("echo", False), ("suffix", ""), ("store", False)):
        fields.only(name, neutral)
    fields.ignore(*IGNORED)
    prompt = fields.value("prompt")
    fields.end()
    answers = sampling.answers
    prompts = _encode(prompt, answers, model)
    ticket = ticket or new_ticket("cmpl", sampling.seed)
    params = [replace(fit(sampling, ids, model, "prompt"), logprobs=logprobs) for ids in prompts]
    firsts = [GenerateRequest(ticket.request_id, ids, one, priority=priority) for ids, one in zip(prompts, params, strict=True)]
    first = replace(firsts[0], constraint=constrain())

    def shape(index: int) -> CompletionShape:
        counts = StreamUsage(tells, len(prompts[index // answers]))
        return CompletionShape(ticket, model_id, counts, CompletionLogprobs(model.text), index)

    more = others_of([one for one in firsts for _ in range(answers)], ticket.seed, constrain)
    others = tuple((other, shape(index)) for index, other in enumerate(more, 1))
    return Job(ticket, first, sampling.stops, stream, shape(0), others, len(prompts))


def _encode(prompt: object, answers: int, model: LoadedModel) -> list[tuple[int, ...]]:
    """OpenAI's four forms: a text, a list of texts, token ids, a list of lists of token ids; each is to get so many answers."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return [_encode_one(prompt, model, "prompt")]
    count = len(prompt) * answers
    if len(prompt) > 1 and count > MOST_CHOICES:
        each = f" with n={answers}" if answers > 1 else ""
        message = f"prompt holds {len(prompt)} prompts{each}: {count} answers; one request gets at most {MOST_CHOICES}, send several"
        raise bad_request(message, "prompt", "invalid_value")
    return [_encode_one(one, model, f"prompt[{index}]" if len(prompt) > 1 else "prompt") for index, one in enumerate(prompt)]


def _encode_one(prompt: object, model: LoadedModel, where: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return encode_prompt(check_text(prompt, where), model, where, add_special_tokens=True)
    if isinstance(prompt, list) and prompt:
        return check_token_ids(prompt, where, model.text.vocabulary)
    raise bad_request(f"{where} must be a text or a list of at least one token id", where, "invalid_type")


class CompletionShape(OpenAiEvents):
    """`text_completion`, whole and in chunks."""

    def __init__(self, ticket: Ticket, model_id: str, tells: StreamUsage, logprobs: CompletionLogprobs, index: int = 0) -> None:
        created = int(ticket.created_s)
        self._frame: Json = {"id": ticket.request_id, "object": "text_completion", "created": created, "model": model_id}
        self._usage = tells
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
        self._usage.add(piece)
        logprobs = self._logprobs.of(piece)
        return [self._chunk(self._choice(piece.text, None, logprobs))] if piece.text or logprobs else []

    def end(self, ending: Ending) -> list[Json]:
        """The finish reason, and the usage in a chunk without choices."""
        chunks = [self._chunk(self._choice("", ending.finish.value))]
        last = self._usage.at_end(ending)
        return [*chunks, {**self._frame, **last}] if last else chunks

    def _chunk(self, choice: Json) -> Json:
        return {**self._frame, "choices": [choice], **self._usage.of_chunk()}

    def _choice(self, text: str, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
