"""Bytes in, bytes out: reading a body, watching the client, sending an answer whole or as a stream.

Whoever has read the body owns `receive()`, and it then says one thing only: the client is gone. uvicorn announces ASGI
2.3, so Starlette's StreamingResponse would consume that message itself; answers are therefore sent here, in plain ASGI.

A client that does not read is stopped in two steps: `send` waits once the transport holds 64 KiB, and server.py cuts the
connection when none of them leave for a while. What waits here meanwhile are token ids, at most max_tokens of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from appliance.engine.api.errors import ApiError, no_engine
from appliance.engine.api.fields import Fields, parse_object
from appliance.engine.api.generation import Ending, Generation, GenerationFailed, Piece, submitted
from appliance.engine.api.metrics import Outcome
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.messages import GenerateRequest

log = logging.getLogger("appliance.engine.http")

Json = dict[str, Any]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Legal inside JSON strings, but clients that split a stream with str.splitlines() break there."""


class ClientGone(Exception):
    """The connection closed; there is nobody to answer."""


class Shape(Protocol):
    """How an endpoint's answers look."""

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream; `piece` is all of it."""

    def begin(self) -> list[Json]:
        """Events before the first text."""

    def piece(self, piece: Piece) -> list[Json]:
        """Events of new text."""

    def end(self, ending: Ending) -> list[Json]:
        """Events after the last text."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what to generate and how to tell it."""

    request: GenerateRequest
    stops: tuple[str, ...]
    stream: bool
    shape: Shape


@dataclass(frozen=True, slots=True)
class Client:
    """Whom an answer goes to; `gateway_id` is the id under which the gateway knows the request, empty without one."""

    send: Send
    gateway_id: str


class JsonEndpoint:
    """POST with a JSON object: admission, limits, errors and a leaving client are the same for all of them."""

    def __init__(self, service: Service, path: str) -> None:
        self._service = service
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        outcome = Outcome.FAILED
        try:
            # Admission first: a client may be about to send 30 MB to an engine that has no model yet.
            with self._service.admitted() as model:
                fields = Fields(parse_object(await read_body(scope, receive, self._service.max_body_bytes)))
                outcome = await while_connected(receive, self.respond(model, fields, Client(send, _gateway_id(scope))))
        except ApiError as error:
            outcome = Outcome.REFUSED
            await send_whole(error.response(), send)
        except ClientGone:
            outcome = Outcome.DISCONNECTED
        finally:
            self._service.metrics.count(self._path, outcome)

    async def respond(self, model: LoadedModel, fields: Fields, client: Client) -> Outcome:
        """Send the answer. Cancelled when the client leaves."""
        raise NotImplementedError


class LookUp(JsonEndpoint):
    """An endpoint that computes its answer from the text side alone."""

    def __init__(self, service: Service, path: str, compute: Callable[[Fields, LoadedModel], Json]) -> None:
        super().__init__(service, path)
        self._compute = compute

    async def respond(self, model: LoadedModel, fields: Fields, client: Client) -> Outcome:
        """`compute` in a worker thread, its result as JSON."""
        answer = await asyncio.to_thread(self._compute, fields, model)
        await send_whole(_json_response(answer), client.send)
        return Outcome.FINISHED


class Generate(JsonEndpoint):
    """An endpoint that generates; `read` turns the body into a job, in a worker thread (rendering and encoding take time)."""

    def __init__(self, service: Service, path: str, read: Callable[[Fields, LoadedModel], Job]) -> None:
        super().__init__(service, path)
        self._read = read

    async def respond(self, model: LoadedModel, fields: Fields, client: Client) -> Outcome:
        """The answer, whole or streamed. Nothing is sent before the engine's first output, so that its refusals are honest."""
        job = await asyncio.to_thread(self._read, fields, model)
        with submitted(model, job.request, job.stops) as generation:
            try:
                return await (self._stream if job.stream else self._whole)(job.shape, generation, client.send)
            finally:
                self._note(job, generation, client)

    async def _whole(self, shape: Shape, generation: Generation, send: Send) -> Outcome:
        try:
            pieces = [piece async for piece in generation.pieces()]
        except GenerationFailed as failure:
            await send_whole(_failed(failure).response(), send)
            return Outcome.FAILED
        whole = Piece("".join(piece.text for piece in pieces), tuple(token for piece in pieces for token in piece.token_ids))
        await send_whole(_json_response(shape.whole(whole, generation.ending())), send)
        return Outcome.FINISHED

    async def _stream(self, shape: Shape, generation: Generation, send: Send) -> Outcome:
        outcome, started = Outcome.FINISHED, False
        try:
            async for event in _events(shape, generation):
                if not started:
                    started = True
                    await send(_STREAM_START)
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except GenerationFailed as failure:
            outcome = Outcome.FAILED
            if not started:
                await send_whole(_failed(failure).response(), send)
                return outcome
            # The status is long gone; an error event without a [DONE] is how OpenAI's clients learn of it.
            await send({"type": "http.response.body", "body": _event(_failed(failure).envelope()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    def _note(self, job: Job, generation: Generation, client: Client) -> None:
        """Count and log one request: lengths and times, never text."""
        whole_s = time.monotonic() - generation.started_s
        first_s = generation.first_token_s
        if first_s is not None:
            self._service.metrics.first_token_s.observe(first_s)
        if generation.succeeded:
            self._service.metrics.whole_s.observe(whole_s)
        log.info(
            "Request %s ended. path=%s gateway_id=%s finish=%s prompt_tokens=%d completion_tokens=%d first_token_s=%s total_s=%.3f",
            job.request.request_id,
            self._path,
            client.gateway_id or "-",
            generation.finish.value if generation.finish else "disconnected",
            len(job.request.prompt_ids),
            generation.completion_tokens,
            "-" if first_s is None else f"{first_s:.3f}",
            whole_s,
        )


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: it is, or says that it is, larger than `max_bytes`.
        ClientGone: the connection closed before its end.
    """
    declared = _header(scope, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run `work` to its end, unless the client goes first: then it is cancelled at once.

    Raises:
        ClientGone: the client went.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_whole(response: Response, send: Send) -> None:
    """A response that is not a stream needs no `receive`."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _events(shape: Shape, generation: Generation) -> AsyncIterator[bytes]:
    begun = False
    async for piece in generation.pieces():
        for event in [] if begun else shape.begin():
            yield _event(event)
        begun = True
        for event in shape.piece(piece):
            yield _event(event)
    for event in shape.end(generation.ending()):
        yield _event(event)
    yield b"data: [DONE]\n\n"


_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
}


def _event(value: Json) -> bytes:
    return f"data: {_dump(value)}\n\n".encode()


def _json_response(value: Json) -> Response:
    return Response(_dump(value).encode(), media_type="application/json")


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)


def _failed(failure: GenerationFailed) -> ApiError:
    return no_engine(str(failure), "generation_failed")


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more; at most {limit} are taken", code="request_too_large")


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _gateway_id(scope: Scope) -> str:
    """The id under which the gateway knows this request; anything that would spoil a log line is dropped."""
    value = _header(scope, b"x-request-id")
    return value if _REQUEST_ID.fullmatch(value) else ""
