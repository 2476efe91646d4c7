"""/generate: SGLang's own endpoint, a text or token ids in, both out."""

from __future__ import annotations

import time
from dataclasses import replace

from appliance.engine.api.constraints import read_constraint
from appliance.engine.api.continuation import Ticket, new_ticket
from appliance.engine.api.errors import bad_request
from appliance.engine.api.exchange import Job, Json, OpenAiEvents
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Ending, Piece, joined
from appliance.engine.api.likelihood import GenerateLogprobs, read_generate_logprobs
from appliance.engine.api.parameters import check_model, encode_prompt, fit, read_priority, read_sampling
from appliance.engine.api.service import LoadedModel
from appliance.engine.messages import FinishReason, GenerateRequest


def read_generate(fields: Fields, model: LoadedModel, ticket: Ticket | None) -> Job:
    """The body of a /generate request, checked; with the ticket of an answer that has begun already.

    Raises:
        ApiError: what is wrong with it.
    """
    check_model(fields, model)
    parameters = fields.nested("sampling_params")
    sampling = read_sampling(parameters, model.text, "max_new_tokens")
    constrain = read_constraint(parameters, model, response_format=False)
    parameters.end()
    stream, priority = fields.flag("stream"), read_priority(fields)
    logprobs = read_generate_logprobs(fields, model.text)
    fields.only("return_routed_experts", False)
    rid = fields.text("rid")
    text, input_ids = fields.text("text"), fields.token_ids("input_ids", model.text.vocabulary)
    fields.end()
    if (text is None) == (input_ids is None) or input_ids == ():
        raise bad_request("send either text or input_ids with at least one token id", "text", "invalid_value")
    if input_ids is None:
        input_ids = encode_prompt(text or "", model, "text", add_special_tokens=True)
    param = "input_ids" if text is None else "text"
    # The engine's ids must be unique, a client's need not be.
    ticket = ticket or new_ticket("gen", sampling.seed)
    params = fit(sampling, input_ids, model, param)
    if logprobs is not None:
        judged = None if logprobs.start is None else logprobs.top
        params = replace(params, logprobs=logprobs.top, prompt_logprobs=judged)
    request = GenerateRequest(ticket.request_id, input_ids, params, constraint=constrain(), priority=priority)
    shape = GenerateShape(rid or ticket.request_id, ticket.created_s, input_ids, logprobs)
    return Job(ticket, request, sampling.stops, stream, shape, shown=sampling.shown)


class GenerateShape(OpenAiEvents):
    """SGLang's answer; the events of a stream carry all of the text and tokens so far, as SGLang's do."""

    def __init__(self, rid: str, started_s: float, prompt_ids: tuple[int, ...], logprobs: GenerateLogprobs | None = None) -> None:
        self._rid = rid
        self._started_s = started_s
        self._prompt_ids = prompt_ids
        self._logprobs = logprobs
        self._so_far = Piece("", ())

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream."""
        self._grow(piece)
        return self._answer(ending)

    def begin(self) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def piece(self, piece: Piece) -> list[Json]:
        """Text and tokens so far."""
        self._grow(piece)
        return [self._told({"id": self._rid, "finish_reason": None, "completion_tokens": len(self._so_far.token_ids)})]

    def end(self, ending: Ending) -> list[Json]:
        """The last event is the whole answer."""
        return [self._answer(ending)]

    def _grow(self, piece: Piece) -> None:
        self._so_far = joined((self._so_far, piece))

    def _answer(self, ending: Ending) -> Json:
        reason: Json = {"type": ending.finish.value}
        if ending.finish is FinishReason.LENGTH:
            reason["length"] = ending.completion_tokens
        elif ending.matched_stop is not None:
            reason["matched"] = ending.matched_stop
        meta = {
            "id": self._rid,
            "finish_reason": reason,
            "prompt_tokens": ending.prompt_tokens,
            "completion_tokens": ending.completion_tokens,
            "cached_tokens": ending.cached_tokens,
            "e2e_latency": round(max(0.0, time.time() - self._started_s), 6),  # the wall clock: it may have begun in an earlier life
        }
        return self._told(meta)

    def _told(self, meta: Json) -> Json:
        judged = {} if self._logprobs is None else self._logprobs.of(self._so_far, self._prompt_ids)
        return {"text": self._so_far.text, "output_ids": list(self._so_far.token_ids), "meta_info": meta | judged}
