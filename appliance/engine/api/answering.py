"""The endpoints that generate: an answer whole or as a stream, with notes beside it for a gateway that asked for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from starlette.types import Message, Send

from appliance.engine.api import several
from appliance.engine.api.continuation import Continuation, Notes, Ticket, read_continuation
from appliance.engine.api.errors import ApiError, bad_request, no_engine
from appliance.engine.api.exchange import Client, Job, Json, JsonEndpoint, event, json_response, send_whole
from appliance.engine.api.fields import Fields
from appliance.engine.api.generation import Generation, GenerationFailed, joined, submitted
from appliance.engine.api.metrics import Outcome
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.messages import GenerateRequest

log = logging.getLogger("appliance.engine.http")

NOTE_INTERVAL_S = 0.25
"""How often a request without a stream tells the gateway how far it is: what a crash then costs, at most."""
Read = Callable[[Fields, LoadedModel, Ticket | None], Job]


class Generate(JsonEndpoint):
    """An endpoint that generates; `read` turns the body into a job, in a worker thread (rendering and encoding take time)."""

    def __init__(self, service: Service, path: str, read: Read) -> None:
        super().__init__(service, path)
        self._read = read

    async def respond(self, model: LoadedModel, fields: Fields, client: Client) -> Outcome:
        """The answer, whole or streamed. Nothing is sent before the engine's first output, so that its refusals are honest."""
        going_on = read_continuation(client.known or b"", model.text.vocabulary)
        job = await asyncio.to_thread(self._read, fields, model, going_on.ticket)
        if job.others:
            return await self._several(model, job, client)
        notes = None if client.known is None else Notes(job.ticket, 0 if going_on.sent else len(going_on.token_ids))
        if job.request.sampling.logprobs is not None and not going_on.sent:
            going_on = Continuation(going_on.ticket)  # nobody noted how likely its tokens were: the same ones are chosen once more
        request = _request(job, going_on, model)
        with submitted(model, request, job.stops, going_on, job.shown) as generation:
            try:
                if job.stream:
                    return await _stream(_events(job, generation, going_on, notes), job.shape.encode, client.send)
                if notes is None:
                    return await _whole(job, generation, client.send)
                return await _stream(_noted_whole(job, generation, notes), event, client.send)
            finally:
                self._note(request, generation, client)

    async def _several(self, model: LoadedModel, job: Job, client: Client) -> Outcome:
        """Several answers. There are no notes of them: over a crash the gateway has them said again from the beginning."""
        first = replace(job.request, sampling=replace(job.request.sampling, seed=job.ticket.seed))
        requests = [first, *(request for request, _ in job.others)]
        with contextlib.ExitStack() as stack:
            generations = [stack.enter_context(submitted(model, request, job.stops, shown=job.shown)) for request in requests]
            try:
                if job.stream:
                    return await _stream(several.events(job, generations), job.shape.encode, client.send)
                try:
                    answer = await several.whole(job, generations)
                except GenerationFailed as failure:
                    await send_whole(_failed(failure).response(), client.send)
                    return Outcome.FAILED
                await send_whole(json_response(answer), client.send)
                return Outcome.FINISHED
            finally:
                for request, generation in zip(requests, generations, strict=True):
                    self._note(request, generation, client)

    def _note(self, request: GenerateRequest, generation: Generation, client: Client) -> None:
        """Count and log one request: lengths and times, never text."""
        whole_s = time.monotonic() - generation.started_s
        first_s = generation.first_token_s
        if first_s is not None:
            self._service.metrics.first_token_s.observe(first_s)
        if generation.succeeded:
            self._service.metrics.whole_s.observe(whole_s)
        log.info(
            "Request %s ended. path=%s gateway_id=%s finish=%s prompt_tokens=%d completion_tokens=%d first_token_s=%s total_s=%.3f",
            request.request_id,
            self._path,
            client.gateway_id or "-",
            generation.finish.value if generation.finish else "disconnected",
            len(request.prompt_ids),
            generation.completion_tokens,
            "-" if first_s is None else f"{first_s:.3f}",
            whole_s,
        )


def _request(job: Job, going_on: Continuation, model: LoadedModel) -> GenerateRequest:
    """The job as the engine gets it. Its seed is the ticket's, so that sampling goes on by the same numbers.

    Raises:
        ApiError: 422: an earlier life had a larger context, and what it generated does not fit into this one.
    """
    request, known = job.request, len(going_on.token_ids)
    sampling = replace(request.sampling, seed=job.ticket.seed)
    if not known:
        return replace(request, sampling=sampling)
    if known > sampling.max_new_tokens and going_on.finish is None:
        context = model.limits.context_length_tokens
        message = (
            f"{len(request.prompt_ids)} prompt tokens and the {known} tokens of the answer so far exceed the context of {context} tokens"
            " with which the engine was started again"
        )
        raise ApiError(422, message, code="context_length_exceeded")
    if request.constraint is not None:
        for token_id in going_on.token_ids:
            request.constraint.take(token_id)
    # Should a connection have broken under a living engine, the old sequence may still be about to be aborted by its own id.
    request_id = f"{job.ticket.request_id}+{known}.{uuid.uuid4().hex[:8]}"
    return replace(request, request_id=request_id, sampling=sampling, answer_ids=going_on.token_ids)


async def _whole(job: Job, generation: Generation, send: Send) -> Outcome:
    try:
        pieces = [piece async for piece in generation.pieces()]
    except GenerationFailed as failure:
        await send_whole(_failed(failure).response(), send)
        return Outcome.FAILED
    await send_whole(json_response(job.shape.whole(joined(pieces), generation.ending())), send)
    return Outcome.FINISHED


async def _stream(events: AsyncIterator[bytes], encode: Callable[[Json], bytes], send: Send) -> Outcome:
    outcome, started = Outcome.FINISHED, False
    try:
        async for one in events:
            if not started:
                started = True
                await send(_STREAM_START)
            await send({"type": "http.response.body", "body": one, "more_body": True})
    except GenerationFailed as failure:
        outcome = Outcome.FAILED
        if not started:
            await send_whole(_failed(failure).response(), send)
            return outcome
        # The status is long gone; an error event without a [DONE] is how OpenAI's clients learn of it.
        await send({"type": "http.response.body", "body": encode(_failed(failure).envelope()), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return outcome


async def _events(job: Job, generation: Generation, going_on: Continuation, notes: Notes | None) -> AsyncIterator[bytes]:
    shape, begun = job.shape, going_on.sent
    shape.piece(generation.told)  # for shapes whose events carry all so far
    async for piece in generation.pieces():
        events = [shape.encode(value) for value in ([] if begun else shape.begin()) + shape.piece(piece)]
        begun = True
        lines = b"" if notes is None else notes.beside(piece.token_ids, generation.finish, generation.cached_tokens)
        if events:
            events[-1] = lines + events[-1]
        elif lines:
            events = [lines + b"\n"]
        if events:
            yield b"".join(events)  # at once: between two events of one piece no crash is to fall, for the notes tell of whole pieces
    for value in shape.end(generation.ending())[going_on.ended :]:
        yield (b"" if notes is None else b":end\n") + shape.encode(value)
    if shape.last:
        yield shape.last


async def _noted_whole(job: Job, generation: Generation, notes: Notes) -> AsyncIterator[bytes]:
    """The answer to a request without a stream, for a gateway: how far it is from time to time, and all of it at the end."""
    pieces, told_s = [generation.told], 0.0
    untold: tuple[int, ...] = ()
    try:
        async for piece in generation.pieces():
            pieces.append(piece)
            untold += piece.token_ids
            if generation.finish is None and time.monotonic() - told_s >= NOTE_INTERVAL_S:
                yield notes.beside(untold, None, generation.cached_tokens) + b"\n"
                untold, told_s = (), time.monotonic()
    except GenerationFailed as failure:
        if not told_s:
            raise
        error = _failed(failure)
        yield f":whole {error.status}\n".encode() + event(error.envelope())
        return
    yield b":whole 200\n" + event(job.shape.whole(joined(pieces), generation.ending()))


_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
}


def _failed(failure: GenerationFailed) -> ApiError:
    """What the request itself made impossible is not to be tried again."""
    return bad_request(str(failure), code="generation_failed") if failure.hopeless else no_engine(str(failure), "generation_failed")
