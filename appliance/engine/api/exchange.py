"""Bytes in, bytes out: reading a body, watching the client, sending an answer whole or as a stream.

Whoever has read the body owns `receive()`, and it then says one thing only: the client is gone. uvicorn announces ASGI
2.3, so Starlette's StreamingResponse would consume that message itself; answers are therefore sent here, in plain ASGI.

A client that does not read is stopped in two steps: `send` waits once the transport holds 64 KiB, and server.py cuts the
connection when none of them leave for a while. What waits here meanwhile are token ids, at most max_tokens of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.engine.api.constraints import Constrain
from appliance.engine.api.continuation import HEADER, MOST_KNOWN_BYTES, Ticket, is_count, split_known
from appliance.engine.api.errors import ApiError
from appliance.engine.api.fields import Fields, parse_object
from appliance.engine.api.generation import Ending, Piece
from appliance.engine.api.metrics import Outcome
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.messages import GenerateRequest

Json = dict[str, Any]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Legal inside JSON strings, but clients that split a stream with str.splitlines() break there."""


class ClientGone(Exception):
    """The connection closed; there is nobody to answer."""


class Shape(Protocol):
    """How an endpoint's answers look.

    Attributes:
        last: what stands behind a stream's last event.
    """

    last: bytes

    def encode(self, value: Json) -> bytes:
        """One event, or an error's envelope as one."""

    def whole(self, piece: Piece, ending: Ending) -> Json:
        """The answer without a stream; `piece` is all of it."""

    def begin(self) -> list[Json]:
        """Events before the first text."""

    def piece(self, piece: Piece) -> list[Json]:
        """Events of new text."""

    def end(self, ending: Ending) -> list[Json]:
        """Events after the last text."""


class OpenAiEvents:
    """OpenAI's events have no names, and an end mark."""

    last = b"data: [DONE]\n\n"

    def encode(self, value: Json) -> bytes:
        """As data alone."""
        return event(value)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what to generate and how to tell it.

    Attributes:
        others: where several answers are wanted, all but the first.
        prompts: how many different ones these answer, each as often as the others.
        shown: special tokens that its shape has to see in the text, by id (ModelText.marks).
    """

    ticket: Ticket
    request: GenerateRequest
    stops: tuple[str, ...]
    stream: bool
    shape: Shape
    others: tuple[tuple[GenerateRequest, Shape], ...] = ()
    prompts: int = 1
    shown: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(request.prompt_ids) for request in (self.request, *(other for other, _ in self.others)))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One an answer."""
        return self.shape, *(shape for _, shape in self.others)


def others_of(requests: Sequence[GenerateRequest], seed: int, constrain: Constrain, seeds: int = 0) -> list[GenerateRequest]:
    """All but the first, made different: each with an id and a seed of its own, which follow from the first one's. With `seeds`, so many
    seeds in turn: those of the answers to one prompt."""
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            sampling=replace(request.sampling, seed=(seed + (index % seeds if seeds else index)) % 2**63),
            constraint=constrain(),
        )
        for index, request in enumerate(requests[1:], 1)
    ]


@dataclass(frozen=True, slots=True)
class Client:
    """Whom an answer goes to.

    Attributes:
        gateway_id: under which the gateway knows the request; empty without one.
        known: what a gateway knows of the answer already; None where none has asked for notes. See continuation.py.
    """

    send: Send
    gateway_id: str
    known: bytes | None = None


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
                header = _header(scope, HEADER)
                body = await read_body(scope, receive, self._service.max_body_bytes + _known_bytes(header))
                known, body = split_known(header, body)
                fields = Fields(parse_object(body))
                outcome = await while_connected(receive, self.respond(model, fields, Client(send, _gateway_id(scope), known)))
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
        await send_whole(json_response(answer), client.send)
        return Outcome.FINISHED


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: it is, or says that it is, larger than `max_bytes`.
        ClientGone: the connection closed before its end.
    """
    declared = _header(scope, b"content-length")
    if is_count(declared) and int(declared) > max_bytes:
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


def event(value: Json) -> bytes:
    """A server-sent event."""
    return f"data: {_dump(value)}\n\n".encode()


def named_event(name: str, value: Json) -> bytes:
    """The same with a name."""
    return f"event: {name}\n".encode() + event(value)


def json_response(value: Json) -> Response:
    """A whole answer."""
    return Response(_dump(value).encode(), media_type="application/json")


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more; at most {limit} are taken", code="request_too_large")


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _known_bytes(header: str) -> int:
    """Room for what the gateway knows, on top of what a client may send."""
    return min(int(header[:9]), MOST_KNOWN_BYTES) if is_count(header) else 0


def _gateway_id(scope: Scope) -> str:
    """The id under which the gateway knows this request; anything that would spoil a log line is dropped."""
    value = _header(scope, b"x-request-id")
    return value if _REQUEST_ID.fullmatch(value) else ""
