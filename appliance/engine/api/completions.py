"""/v1/completions: a text or token ids to go on from; answers in OpenAI's form."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from appliance.engine.messages import FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from: `text` is how it is echoed."""

    ids: tuple[int, ...]
    text: str


def read_completion(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a completion request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    model_id, echo = check_model(fields, model), fields.flag("echo")
    least = 0 if echo else 1  # evaluation harnesses ask for the prompt's own likelihoods, and no answer
    sampling = read_sampling(fields, model.text, "max_tokens", "max_completion_tokens", most_answers=MOST_ANSWERS, least_tokens=least)
    logprobs, constrain = read_completion_logprobs(fields), read_constraint(fields, model)
    stream, tells = read_stream(fields)
    priority = read_priority(fields)
    for name, neutral in (("best_of", 1), ("suffix", ""), ("store", False)):
        fields.only(name, neutral)
    fields.ignore(*IGNORED)
    prompt = fields.value("prompt")
    fields.end()
    answers, answered = sampling.answers, sampling.max_new_tokens != 0
    prompts = _encode(prompt, answers, model)
    ticket = ticket or new_ticket("cmpl", sampling.seed)
    params = replace(sampling.params, logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    wanted = replace(sampling, max_new_tokens=sampling.max_new_tokens if answered else 1, params=params)
    requests = [GenerateRequest(ticket.request_id, one.ids, fit(wanted, one.ids, model, "prompt"), priority=priority) for one in prompts]

    def shape(index: int) -> CompletionShape:
        mine = prompts[index // answers]
        told = CompletionLogprobs(model.text, logprobs is not None, mine.ids, echo)
        return CompletionShape(ticket, model_id, StreamUsage(tells, len(mine.ids)), told, index, mine.text if echo else "", answered)

    # A prompt that comes with others has the answer that it has alone, where the client chose the seed.
    seeds = 0 if sampling.seed is None else answers
    more = others_of([one for one in requests for _ in range(answers)], ticket.seed, constrain, seeds)
    others = tuple((other, shape(index)) for index, other in enumerate(more, 1))
    first = replace(requests[0], constraint=constrain())
    return Job(ticket, first, sampling.stops, stream, shape(0), others, len(prompts), shown=sampling.shown)


def _encode(prompt: object, answers: int, model: LoadedModel) -> list[Prompt]:
    """OpenAI's four forms: a text, a list of texts, token ids, a list of lists of token ids; each is to get so many answers."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return [_encode_one(prompt, model, "prompt")]
    count = len(prompt) * answers
    if len(prompt) > 1 and count > MOST_CHOICES:
        each = f" with n={answers}" if answers > 1 else ""
        message = f"prompt holds {len(prompt)} prompts{each}: {count} answers; one request gets at most {MOST_CHOICES}, send several"
        raise bad_request(message, "prompt", "invalid_value")
    return [_encode_one(one, model, f"prompt[{index}]" if len(prompt) > 1 else "prompt") for index, one in enumerate(prompt)]


def _encode_one(prompt: object, model: LoadedModel, where: str) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(encode_prompt(check_text(prompt, where), model, where, add_special_tokens=True), prompt)
    if isinstance(prompt, list) and prompt:
        ids = check_token_ids(prompt, where, model.text.vocabulary)
        return Prompt(ids, model.text.detokenizer(()).feed(ids))  # a character that it leaves unfinished is the answer's
    raise bad_request(f"{where} must be a text or a list of at least one token id", where, "invalid_type")


class CompletionShape(OpenAiEvents):
    """`text_completion`, whole and in chunks."""

    def __init__(
        self,
        ticket: Ticket,
        model_id: str,
        tells: StreamUsage,
        logprobs: CompletionLogprobs,
        index: int = 0,
        echo: str = "",
        answered: bool = True,
    ) -> None:
        """`echo`: what stands before the answer. Not `answered`: nothing was asked for but that, and the one token is not told."""
        created = int(ticket.created_s)
        self._frame: Json = {"id": ticket.request_id, "object": "text_completion", "created": created, "model": model_id}
        self._usage = tells
        self._logprobs = logprobs
        self._index = index
        self._echo = echo
        self._answered = answered
        self._begins = False

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        piece, ending = self._told(piece), self._ended(ending)
        choice = self._choice(self._echo + piece.text, ending.finish.value, self._logprobs.of(piece, begins=True))
        return {**self._frame, "choices": [choice], "usage": usage(ending)}

    def begin(self) -> list[Json]:
        """An echo comes with the first text: how likely its tokens were is known by then."""
        self._begins = True
        return []

    def piece(self, piece: Piece) -> list[Json]:
        """New text, if any is certain yet, and how likely its tokens were."""
        piece, begins, self._begins = self._told(piece), self._begins, False
        self._usage.add(piece)
        logprobs, text = self._logprobs.of(piece, begins), (self._echo if begins else "") + piece.text
        return [self._chunk(self._choice(text, None, logprobs))] if text or logprobs else []

    def end(self, ending: Ending) -> list[Json]:
        """The finish reason, and the usage in a chunk without choices."""
        ending = self._ended(ending)
        chunks = [self._chunk(self._choice("", ending.finish.value))]
        last = self._usage.at_end(ending)
        return [*chunks, {**self._frame, **last}] if last else chunks

    def _told(self, piece: Piece) -> Piece:
        return piece if self._answered else Piece("", (), (), piece.prompt_likelihoods)

    def _ended(self, ending: Ending) -> Ending:
        return ending if self._answered else replace(ending, finish=FinishReason.LENGTH, completion_tokens=0)

    def _chunk(self, choice: Json) -> Json:
        return {**self._frame, "choices": [choice], **self._usage.of_chunk()}

    def _choice(self, text: str, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
